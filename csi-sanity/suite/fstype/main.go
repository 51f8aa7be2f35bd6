// Command fstype is csi-sanity with a file system of choice.
//
// The upstream suite names no fs_type, and has no flag for it: it tests a driver's default alone.
// Here the connection to the driver fills fs_type in, wherever a request has it empty; the tests
// are upstream's, and the driver sees what a StorageClass with that fsType would make it see.
//
// With -at-node it asks, in the same way, for the volumes of the tests of the node service at that
// node: the suite knows one node, and names no topology there, although the driver says that its
// volumes have one. A scheduler would.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

type outcome struct{ failed bool }

func (o *outcome) Fail() { o.failed = true }

func main() {
	config := sanity.NewTestConfig()
	fsType := flag.String("fstype", "", "file system to ask for")
	atNode := flag.Bool("at-node", false, "volumes for the node's tests are asked for there")
	// The same flags as upstream's command, as far as run.sh uses them.
	flag.StringVar(&config.Address, "csi.endpoint", "", "")
	flag.StringVar(&config.ControllerAddress, "csi.controllerendpoint", "", "")
	flag.StringVar(&config.TargetPath, "csi.mountdir", config.TargetPath, "")
	flag.StringVar(&config.StagingPath, "csi.stagingdir", config.StagingPath, "")
	flag.StringVar(&config.SecretsFile, "csi.secrets", "", "")
	flag.StringVar(&config.TestVolumeAccessType, "csi.testvolumeaccesstype", config.TestVolumeAccessType, "")
	flag.Int64Var(&config.TestVolumeSize, "csi.testvolumesize", config.TestVolumeSize, "")
	flag.Int64Var(&config.TestVolumeExpandSize, "csi.testvolumeexpandsize", config.TestVolumeExpandSize, "")
	flag.StringVar(&config.TestVolumeParametersFile, "csi.testvolumeparameters", "", "")
	flag.StringVar(&config.TestVolumeMutableParametersFile, "csi.testvolumemutableparameters", "", "")
	flag.StringVar(&config.TestSnapshotParametersFile, "csi.testsnapshotparameters", "", "")
	flag.Parse()
	if config.Address == "" || (*fsType == "" && !*atNode) {
		fmt.Fprintln(os.Stderr, "-csi.endpoint, and -fstype or -at-node, are needed")
		os.Exit(2)
	}
	var node *csi.Topology
	if *atNode {
		var err error
		if node, err = topology(config.Address); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
	}
	asked := grpc.WithUnaryInterceptor(ask(*fsType, node))
	config.DialOptions = append(config.DialOptions, asked)
	config.ControllerDialOptions = append(config.ControllerDialOptions, asked)

	result := new(outcome)
	sanity.Test(result, config)
	if result.failed {
		os.Exit(1)
	}
}

// topology is where the node at an endpoint is.
func topology(endpoint string) (*csi.Topology, error) {
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, new(csi.NodeGetInfoRequest))
	return info.GetAccessibleTopology(), err
}

// place asks for a volume of the node's tests at the node.
func place(request any, node *csi.Topology) {
	create, ok := request.(*csi.CreateVolumeRequest)
	if ok && node != nil && create.AccessibilityRequirements == nil &&
		strings.HasPrefix(create.Name, "sanity-node-") {
		create.AccessibilityRequirements = &csi.TopologyRequirement{
			Requisite: []*csi.Topology{node},
			Preferred: []*csi.Topology{node},
		}
	}
}

func ask(fsType string, node *csi.Topology) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
		call grpc.UnaryInvoker, options ...grpc.CallOption,
	) error {
		place(request, node)
		if message, ok := request.(proto.Message); ok && fsType != "" {
			fill(message.ProtoReflect(), fsType)
		}
		return call(ctx, method, request, reply, conn, options...)
	}
}

// fill looks for mounts in all of a request, so no call is forgotten.
func fill(message protoreflect.Message, fsType string) {
	if mount, ok := message.Interface().(*csi.VolumeCapability_MountVolume); ok && mount.FsType == "" {
		mount.FsType = fsType
	}
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap() || field.Message() == nil:
		case field.IsList():
			for i := range value.List().Len() {
				fill(value.List().Get(i).Message(), fsType)
			}
		default:
			fill(value.Message(), fsType)
		}
		return true
	})
}
