// Command fstype is csi-sanity with a selectable file system.
//
// The upstream suite sets no fs_type, and has no flag for it: it tests only a driver's default.
// Here the connection to the driver sets fs_type wherever a request leaves it empty. The tests are
// upstream's, and the driver receives the same requests as with a StorageClass with that fsType.
//
// With -at-node, it requests the volumes for the tests of the node service at that node: the suite
// knows one node, and sends no topology in these tests, although the driver reports that its
// volumes have one. A scheduler would send it.
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
	fsType := flag.String("fstype", "", "file system to request")
	atNode := flag.Bool("at-node", false, "request volumes for the node's tests at that node")
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

// topology is the topology of the node at an endpoint.
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

// place requests a volume for the node's tests at the node.
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

// fill searches the whole request for mounts, so that no call is missed.
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
