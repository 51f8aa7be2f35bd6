package main

import (
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

var official = facts(csi.File_csi_proto)

// changed compares the official interface with a changed copy.
func changed(t *testing.T, change func(*descriptorpb.FileDescriptorProto)) []string {
	t.Helper()
	copy := protodesc.ToFileDescriptorProto(csi.File_csi_proto)
	change(copy)
	// Changed copies need not be valid; the comparison only has to detect the change.
	file, err := protodesc.FileOptions{AllowUnresolvable: true}.New(copy, nil)
	if err != nil {
		return []string{err.Error()}
	}
	return compare(official, facts(file))
}

func TestTheInterfaceIsTheSameAsItself(t *testing.T) {
	if lines := changed(t, func(*descriptorpb.FileDescriptorProto) {}); len(lines) != 0 {
		t.Fatal(lines)
	}
}

func TestOrderIsNoDifference(t *testing.T) {
	lines := changed(t, func(file *descriptorpb.FileDescriptorProto) {
		for i, j := 0, len(file.MessageType)-1; i < j; i, j = i+1, j-1 {
			file.MessageType[i], file.MessageType[j] = file.MessageType[j], file.MessageType[i]
		}
	})
	if len(lines) != 0 {
		t.Fatal(lines)
	}
}

func TestAChangedNumberIsFound(t *testing.T) {
	lines := changed(t, func(file *descriptorpb.FileDescriptorProto) {
		field(t, file, "CreateVolumeRequest", "secrets").Number = proto.Int32(99)
	})
	want := "differs csi/message_type[CreateVolumeRequest]/field[secrets]/number: ours 99, official 5"
	if len(lines) != 1 || lines[0] != want {
		t.Fatal(lines)
	}
}

func TestALostSecretMarkIsFound(t *testing.T) {
	lines := changed(t, func(file *descriptorpb.FileDescriptorProto) {
		proto.ClearExtension(field(t, file, "CreateVolumeRequest", "secrets").Options, csi.E_CsiSecret)
	})
	want := "missing csi/message_type[CreateVolumeRequest]/field[secrets]/options/(csi.v1.csi_secret): true"
	if len(lines) != 1 || lines[0] != want {
		t.Fatal(lines)
	}
}

func field(t *testing.T, file *descriptorpb.FileDescriptorProto, message, name string) *descriptorpb.FieldDescriptorProto {
	t.Helper()
	for _, m := range file.MessageType {
		for _, f := range m.Field {
			if m.GetName() == message && f.GetName() == name {
				return f
			}
		}
	}
	t.Fatalf("no %s.%s", message, name)
	return nil
}

// Changes every number, word and flag of the interface, one at a time.
func TestEveryChangeIsFound(t *testing.T) {
	ignored := map[string]bool{"go_package": true}
	total := 0
	for n := 0; ; n++ {
		var what string
		lines := changed(t, func(file *descriptorpb.FileDescriptorProto) {
			left := n
			what = mutate(file.ProtoReflect(), &left, ignored)
		})
		if what == "" {
			break
		}
		total++
		if len(lines) == 0 {
			t.Errorf("not found: %s", what)
		}
	}
	if total < 1000 {
		t.Errorf("only %d changes were tried", total)
	}
	t.Logf("%d changes", total)
}

// mutate changes the leaf that comes after `left` others, and returns its name.
func mutate(message protoreflect.Message, left *int, ignored map[string]bool) (what string) {
	// Range has no fixed order.
	fields := message.Descriptor().Fields()
	var all []protoreflect.FieldDescriptor
	for i := 0; i < fields.Len(); i++ {
		all = append(all, fields.Get(i))
	}
	for _, extension := range []protoreflect.ExtensionType{
		csi.E_AlphaEnum, csi.E_AlphaEnumValue, csi.E_AlphaField, csi.E_AlphaMessage,
		csi.E_AlphaMethod, csi.E_AlphaService, csi.E_CsiSecret,
	} {
		if extension.TypeDescriptor().ContainingMessage().FullName() == message.Descriptor().FullName() {
			all = append(all, extension.TypeDescriptor())
		}
	}
	for _, field := range all {
		if !message.Has(field) || ignored[string(field.Name())] {
			continue
		}
		name := func() string { return fmt.Sprintf("%s of %v", field.FullName(), message.Interface()) }
		switch value := message.Get(field); {
		case field.IsList() && field.Message() != nil:
			for i := 0; i < value.List().Len(); i++ {
				if what := mutate(value.List().Get(i).Message(), left, ignored); what != "" {
					return what
				}
			}
		case field.Message() != nil:
			if what := mutate(value.Message(), left, ignored); what != "" {
				return what
			}
		case *left > 0:
			*left--
		case field.IsList():
			value.List().Truncate(0)
			return name()
		case field.Kind() == protoreflect.StringKind:
			message.Set(field, protoreflect.ValueOfString(value.String()+"x"))
			return name()
		case field.Kind() == protoreflect.Int32Kind:
			message.Set(field, protoreflect.ValueOfInt32(int32(value.Int())+1))
			return name()
		case field.Kind() == protoreflect.EnumKind:
			// Another existing value; an absent one would mean the same in some places.
			other := (value.Enum() + 1) % protoreflect.EnumNumber(field.Enum().Values().Len()+1)
			message.Set(field, protoreflect.ValueOfEnum(max(other, 1)))
			return name()
		case field.Kind() == protoreflect.BoolKind:
			message.Set(field, protoreflect.ValueOfBool(!value.Bool()))
			return name()
		default:
			panic("can't change " + name())
		}
	}
	return ""
}
