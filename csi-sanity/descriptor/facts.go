package main

import (
	"fmt"
	"sort"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// facts takes a file apart into paths and values. It walks the descriptor by reflection, so that
// a kind of fact nobody thought of is compared, too. The order of things in the file is none.
func facts(file protoreflect.FileDescriptor) map[string]string {
	descriptor := protodesc.ToFileDescriptorProto(file)
	// The same interface can be generated into any Go package, and be commented in any way.
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

// element records one of a list under its own name, or under its content if it has none.
func element(found map[string]string, list string, owner protoreflect.Message, value protoreflect.Value) {
	inner, ok := value.Interface().(protoreflect.Message)
	if !ok {
		found[fmt.Sprintf("%s[%v]", list, value)] = "present"
		return
	}
	if field, ok := inner.Interface().(*descriptorpb.FieldDescriptorProto); ok && field.OneofIndex != nil {
		// A position would depend on the order in the file, the name doesn't.
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

// key is what tells elements of a list apart.
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

// compare lists what is in one only, and what has two values.
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
