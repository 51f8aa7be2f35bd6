// livenessprobe answers /healthz with the outcome of a CSI Probe call. It is
// our own stand-in for the upstream sidecar of that name (which is not to
// be had as a Go module here), with the same flags.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/kubernetes-csi/csi-lib-utils/connection"
	"github.com/kubernetes-csi/csi-lib-utils/metrics"
	"github.com/kubernetes-csi/csi-lib-utils/rpc"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

var version = "unknown"

var (
	csiAddress     = flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	probeTimeout   = flag.Duration("probe-timeout", time.Second, "time for one Probe call")
	healthPort     = flag.String("health-port", "9808", "port to serve /healthz on")
	httpEndpoint   = flag.String("http-endpoint", "", "address to serve /healthz on, instead of health-port")
	metricsAddress = flag.String("metrics-address", "", "ignored here")
	showVersion    = flag.Bool("version", false, "print the version and exit")
)

func main() {
	klog.InitFlags(nil)
	flag.Set("logtostderr", "true")
	flag.Parse()
	if *showVersion {
		fmt.Println(os.Args[0], version)
		return
	}
	mm := metrics.NewCSIMetricsManager("")
	connect := func(ctx context.Context) (*grpc.ClientConn, error) {
		return connection.Connect(ctx, *csiAddress, mm)
	}
	ctx := context.Background()
	conn, err := connect(ctx)
	if err != nil {
		klog.ErrorS(err, "failed to establish connection to CSI driver")
		os.Exit(1)
	}
	name, err := rpc.GetDriverName(ctx, conn)
	if err != nil {
		klog.ErrorS(err, "failed to get CSI driver name")
		os.Exit(1)
	}
	conn.Close()
	klog.InfoS("CSI driver name", "driver", name, "version", version)

	http.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), *probeTimeout)
		defer cancel()
		conn, err := connect(ctx)
		if err == nil {
			defer conn.Close()
			var ready bool
			if ready, err = rpc.Probe(ctx, conn); err == nil && !ready {
				err = fmt.Errorf("driver responded but is not ready")
			}
		}
		if err != nil {
			klog.ErrorS(err, "Health check failed")
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, "ok")
	})
	addr := *httpEndpoint
	if addr == "" {
		addr = net.JoinHostPort("0.0.0.0", *healthPort)
	}
	klog.InfoS("ServeMux listening", "address", addr)
	klog.ErrorS(http.ListenAndServe(addr, nil), "failed to serve")
	os.Exit(1)
}
