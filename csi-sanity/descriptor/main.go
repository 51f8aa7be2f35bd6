// Command descriptor compares our copy of the CSI interface with the official one.
//
//	descriptor FILE
//
// FILE is a serialized FileDescriptorSet that has csi.proto in it. Each difference is a line:
// "missing" is in the official interface only, "extra" in ours only, "differs" has both values.
// Exit code 0: no difference; 1: some; 2: FILE can't be judged.
package main

import (
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	if len(os.Args) != 2 {
		fail("usage: descriptor FILE")
	}
	bytes, err := os.ReadFile(os.Args[1])
	if err != nil {
		fail(err.Error())
	}
	ours, err := read(bytes)
	if err != nil {
		fail(fmt.Sprintf("%s: %v", os.Args[1], err))
	}
	official := facts(csi.File_csi_proto)
	differences := compare(official, facts(ours))
	for _, line := range differences {
		fmt.Println(line)
	}
	if len(differences) > 0 {
		os.Exit(1)
	}
	fmt.Printf("the same: %d facts\n", len(official))
}

func fail(sentence string) {
	fmt.Fprintln(os.Stderr, sentence)
	os.Exit(2)
}

// read finds csi.proto in a set and resolves it, which also checks that it is valid.
func read(bytes []byte) (protoreflect.FileDescriptor, error) {
	// This program knows the options of CSI, so they are decoded and not left as bytes.
	set := new(descriptorpb.FileDescriptorSet)
	if err := proto.Unmarshal(bytes, set); err != nil {
		return nil, err
	}
	files, err := protodesc.NewFiles(set)
	if err != nil {
		return nil, err
	}
	return files.FindFileByPath(csi.File_csi_proto.Path())
}
