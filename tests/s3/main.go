// Command s3 is an S3-compatible server for tests: versitygw, with objects in a folder.
//
//	s3 serve FOLDER SOCKET REGION     serves until stdin ends
//	s3 put SOCKET REGION KEY...       stores stdin as objects, in parts if it is larger than one
//	s3 delete SOCKET REGION KEY
//
// The keys of the only user are in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. The
// bucket is "bucket". The server listens on a socket of Unix, so that no port has to be free.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

const (
	bucket = "bucket"
	// The smallest part that S3 allows.
	partBytes = 5 << 20
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "s3:", err)
		os.Exit(1)
	}
}

func run(words []string) error {
	switch {
	case len(words) == 4 && words[0] == "serve":
		return serve(words[1], words[2], words[3])
	case len(words) >= 4 && words[0] == "put":
		content, err := io.ReadAll(os.Stdin)
		if err != nil {
			return err
		}
		to := client(words[1], words[2])
		for _, key := range words[3:] {
			if err := put(to, key, content); err != nil {
				return err
			}
		}
		return nil
	case len(words) == 4 && words[0] == "delete":
		_, err := client(words[1], words[2]).DeleteObject(context.Background(),
			&s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: aws.String(words[3])})
		return err
	}
	return errors.New("usage: s3 serve FOLDER SOCKET REGION | put SOCKET REGION KEY... | delete SOCKET REGION KEY")
}

func serve(folder, socket, region string) error {
	objects, attributes := filepath.Join(folder, "objects"), filepath.Join(folder, "attributes")
	for _, path := range []string{filepath.Join(objects, bucket), attributes} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
	}
	// Not every file system of a machine that runs tests has extended attributes.
	side, err := meta.NewSideCar(attributes)
	if err != nil {
		return err
	}
	storage, err := posix.New(objects, side, posix.PosixOpts{SideCarDir: attributes})
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		end()
	}()
	err = embedgw.RunVersityGW(ctx, storage, &embedgw.Config{
		RootUserAccess:    os.Getenv("AWS_ACCESS_KEY_ID"),
		RootUserSecret:    os.Getenv("AWS_SECRET_ACCESS_KEY"),
		Region:            region,
		Ports:             []string{socket},
		MaxConnections:    1000,
		MaxRequests:       1000,
		MultipartMaxParts: 100,
		Quiet:             true,
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func client(socket, region string) *s3.Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return s3.New(s3.Options{
		BaseEndpoint: aws.String("http://s3.test"),
		UsePathStyle: true,
		Region:       region,
		HTTPClient:   &http.Client{Transport: &http.Transport{DialContext: dial}},
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{
				AccessKeyID:     os.Getenv("AWS_ACCESS_KEY_ID"),
				SecretAccessKey: os.Getenv("AWS_SECRET_ACCESS_KEY"),
			}, nil
		}),
	})
}

func put(to *s3.Client, key string, content []byte) error {
	ctx := context.Background()
	if len(content) <= partBytes {
		_, err := to.PutObject(ctx, &s3.PutObjectInput{
			Bucket: aws.String(bucket), Key: aws.String(key), Body: bytes.NewReader(content),
		})
		return err
	}
	upload, err := to.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
		Bucket: aws.String(bucket), Key: aws.String(key),
	})
	if err != nil {
		return err
	}
	var parts []types.CompletedPart
	for number := int32(1); len(content) > 0; number++ {
		part := content[:min(partBytes, len(content))]
		content = content[len(part):]
		done, err := to.UploadPart(ctx, &s3.UploadPartInput{
			Bucket: aws.String(bucket), Key: aws.String(key), UploadId: upload.UploadId,
			PartNumber: aws.Int32(number), Body: bytes.NewReader(part),
		})
		if err != nil {
			return err
		}
		parts = append(parts, types.CompletedPart{ETag: done.ETag, PartNumber: aws.Int32(number)})
	}
	_, err = to.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
		Bucket: aws.String(bucket), Key: aws.String(key), UploadId: upload.UploadId,
		MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
	})
	return err
}
