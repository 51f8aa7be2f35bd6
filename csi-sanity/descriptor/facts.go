package main

import (
	"fmt"
	"sort"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// facts flattens a file into paths and values. It walks the descriptor by reflection, so that it
// also compares kinds of facts that this program does not know. The order within the file is
// ignored.
func facts(file protoreflect.FileDescriptor) map[string]string {
	descriptor := protodesc.ToFileDescriptorProto(file)
	// The same interface can be generated into any Go package, and can have any comments.
	if descriptor.Options != nil {
		descriptor.Options.GoPackage = nil
	}
	descriptor.SourceCodeInfo = nil
	found := make(map[string]string)
	walk(found, "csi", descriptor.ProtoReflect())
	return found
}

func walk(found map[string]string, path string, message protoreflect.Message) {
	if unknown := message.GetUnknown(); len(unknown) > 0 {
		found[path+" unknown"] = fmt.Sprintf("%x", unknown)
	}
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		name := path + "/" + string(field.Name())
		if field.IsExtension() {
			name = path + "/(" + string(field.FullName()) + ")"
		}
		switch {
		case field.IsMap():
			panic(name + ": descriptors have no maps")
		case field.IsList():
			for i := 0; i < value.List().Len(); i++ {
				element(found, name, message, value.List().Get(i))
			}
		case field.Message() != nil:
			walk(found, name, value.Message())
		case field.Enum() != nil:
			found[name] = string(field.Enum().Values().ByNumber(value.Enum()).Name())
		default:
			found[name] = value.String()
		}
		return true
	})
}

// element records an element of a list under its own name, or under its content if it has no name.
func element(found map[string]string, list string, owner protoreflect.Message, value protoreflect.Value) {
	inner, ok := value.Interface().(protoreflect.Message)
	if !ok {
		found[fmt.Sprintf("%s[%v]", list, value)] = "present"
		return
	}
	if field, ok := inner.Interface().(*descriptorpb.FieldDescriptorProto); ok && field.OneofIndex != nil {
		// An index would depend on the order in the file; the name does not.
		oneof := owner.Interface().(*descriptorpb.DescriptorProto).GetOneofDecl()[field.GetOneofIndex()]
		field = proto.CloneOf(field)
		field.OneofIndex = nil
		found[fmt.Sprintf("%s[%s]/oneof", list, field.GetName())] = oneof.GetName()
		inner = field.ProtoReflect()
	}
	path := fmt.Sprintf("%s[%s]", list, key(inner))
	found[path] = "present"
	walk(found, path, inner)
}

// key distinguishes the elements of a list.
func key(element protoreflect.Message) string {
	field := element.Descriptor().Fields().ByName
	switch {
	case field("name") != nil:
		return element.Get(field("name")).String()
	case field("start") != nil:
		return fmt.Sprintf("%v to %v", element.Get(field("start")), element.Get(field("end")))
	default:
		panic(fmt.Sprintf("no key for %v", element.Descriptor().FullName()))
	}
}

// compare lists facts that are in one map only, and facts with different values.
func compare(official, ours map[string]string) []string {
	var lines []string
	for path, value := range official {
		mine, ok := ours[path]
		switch {
		case !ok:
			lines = append(lines, fmt.Sprintf("missing %s: %s", path, value))
		case mine != value:
			lines = append(lines, fmt.Sprintf("differs %s: ours %s, official %s", path, mine, value))
		}
	}
	for path, value := range ours {
		if _, ok := official[path]; !ok {
			lines = append(lines, fmt.Sprintf("extra %s: %s", path, value))
		}
	}
	sort.Strings(lines)
	return lines
}
