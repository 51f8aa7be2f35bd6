// Command ready waits until a CSI driver reports that it is ready, for as long as the sidecars
// would.
//
//	ready ENDPOINT TIMEOUT
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	if len(os.Args) != 3 {
		fail("usage: ready ENDPOINT TIMEOUT")
	}
	timeout, err := time.ParseDuration(os.Args[2])
	if err != nil {
		fail(err.Error())
	}
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fail(err.Error())
	}
	deadline := time.Now().Add(timeout)
	for {
		if err = probe(csi.NewIdentityClient(conn)); err == nil {
			return
		}
		if time.Now().After(deadline) {
			fail(fmt.Sprintf("not ready after %v: %v", timeout, err))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func probe(driver csi.IdentityClient) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	answer, err := driver.Probe(ctx, new(csi.ProbeRequest))
	// A missing field means ready.
	if err == nil && answer.GetReady() != nil && !answer.GetReady().GetValue() {
		return fmt.Errorf("the driver is still starting")
	}
	return err
}

func fail(sentence string) {
	fmt.Fprintln(os.Stderr, sentence)
	os.Exit(1)
}
