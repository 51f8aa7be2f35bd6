// csi-node-driver-registrar registers a CSI driver with the kubelet's plugin
// watcher. It is our own stand-in for the upstream sidecar of that name
// (which is not to be had as a Go module here): the same flags, sockets and
// behaviour, as far as a driver's pods and the kubelet see them.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kubernetes-csi/csi-lib-utils/connection"
	"github.com/kubernetes-csi/csi-lib-utils/metrics"
	"github.com/kubernetes-csi/csi-lib-utils/rpc"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var version = "unknown"

var (
	csiAddress   = flag.String("csi-address", "/run/csi/socket", "the driver's socket, as this container sees it")
	pluginPath   = flag.String("plugin-registration-path", "/registration", "folder for the registration socket, as this container sees it")
	kubeletPath  = flag.String("kubelet-registration-path", "", "the driver's socket, as the kubelet sees it")
	timeout      = flag.Duration("timeout", time.Second, "time for one call to the driver")
	httpEndpoint = flag.String("http-endpoint", "", "address to serve /healthz on (off when empty)")
	_            = flag.Duration("operation-timeout", time.Second, "obsolete, ignored")
	_            = flag.Int("health-port", 0, "obsolete, ignored")
	_            = flag.Bool("enable-pprof", false, "ignored here")
	mode         = flag.String("mode", "registration", "registration, or kubelet-registration-probe")
	showVersion  = flag.Bool("version", false, "print the version and exit")
)

type registrar struct {
	registerapi.UnimplementedRegistrationServer
	name, endpoint string
}

func (r registrar) GetInfo(_ context.Context, req *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	klog.InfoS("Received GetInfo call", "request", req.String())
	return &registerapi.PluginInfo{
		Type:              registerapi.CSIPlugin,
		Name:              r.name,
		Endpoint:          r.endpoint,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (r registrar) NotifyRegistrationStatus(_ context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	klog.InfoS("Received NotifyRegistrationStatus call", "registered", s.PluginRegistered, "error", s.Error)
	if !s.PluginRegistered {
		klog.ErrorS(nil, "Registration process failed, restarting registration container", "error", s.Error)
		os.Exit(1)
	}
	// what the kubelet-registration-probe mode looks for, where that folder is mounted
	if f, err := os.Create(filepath.Join(filepath.Dir(r.endpoint), "registration")); err == nil {
		f.Close()
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

func fatal(err error, msg string) {
	klog.ErrorS(err, msg)
	os.Exit(1)
}

func main() {
	klog.InitFlags(nil)
	flag.Set("logtostderr", "true")
	flag.Parse()
	if *showVersion {
		fmt.Println(os.Args[0], version)
		return
	}
	if *kubeletPath == "" {
		fatal(nil, "kubelet-registration-path is a required parameter")
	}
	if *mode == "kubelet-registration-probe" {
		if _, err := os.Stat(filepath.Join(filepath.Dir(*kubeletPath), "registration")); err != nil {
			fatal(err, "kubelet plugin registration hasn't succeeded yet")
		}
		return
	}
	klog.InfoS("Version", "version", version)

	ctx := context.Background()
	conn, err := connection.Connect(ctx, *csiAddress, metrics.NewCSIMetricsManager(""))
	if err != nil {
		fatal(err, "Error connecting to CSI driver")
	}
	var name string
	for {
		cctx, cancel := context.WithTimeout(ctx, *timeout)
		name, err = rpc.GetDriverName(cctx, conn)
		cancel()
		if err == nil {
			break
		}
		klog.ErrorS(err, "Error retreiving CSI driver name, trying again")
		time.Sleep(time.Second)
	}
	conn.Close()
	klog.InfoS("CSI driver name", "name", name)

	sock := filepath.Join(*pluginPath, name+"-reg.sock")
	if err := os.Remove(sock); err != nil && !os.IsNotExist(err) {
		fatal(err, "failed to remove stale socket")
	}
	old := syscall.Umask(0077)
	l, err := net.Listen("unix", sock)
	syscall.Umask(old)
	if err != nil {
		fatal(err, "failed to listen")
	}
	klog.InfoS("Registration Server started", "socketPath", sock)
	srv := grpc.NewServer()
	registerapi.RegisterRegistrationServer(srv, registrar{name: name, endpoint: *kubeletPath})

	if *httpEndpoint != "" {
		http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
			if fi, err := os.Stat(sock); err != nil || fi.Mode()&os.ModeSocket == 0 {
				http.Error(w, fmt.Sprintf("no registration socket: %v", err), http.StatusInternalServerError)
				return
			}
			fmt.Fprintln(w, "ok")
		})
		go func() { fatal(http.ListenAndServe(*httpEndpoint, nil), "failed to serve http") }()
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		os.Remove(sock)
		os.Exit(0)
	}()
	fatal(srv.Serve(l), "registration server ended")
}
