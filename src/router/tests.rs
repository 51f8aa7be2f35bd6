//! Checks messages as an earlier release has sent them, with every field set: this program parses
//! them and encodes them to the same bytes. Router and agents are of different releases during an
//! upgrade.

use std::collections::BTreeSet;

use prost::Message;
use prost_reflect::{
    DescriptorPool, DynamicMessage, EnumValueDescriptor, FieldDescriptor, Kind, MapKey,
    MessageDescriptor, Value,
};

use crate::agent::*;
use crate::record::formats::{check_with, files};

/// A value other than the default.
fn value(field: &FieldDescriptor, kind: &Kind) -> Value {
    let number = field.number();
    match kind {
        Kind::Bool => Value::Bool(true),
        Kind::String => Value::String(format!("text {number}")),
        Kind::Int32 => Value::I32(1000 + number as i32),
        Kind::Int64 => Value::I64(1000 + i64::from(number)),
        Kind::Uint32 => Value::U32(1000 + number),
        Kind::Bytes => Value::Bytes(format!("bytes {number}").into_bytes().into()),
        Kind::Uint64 => Value::U64(1000 + u64::from(number)),
        Kind::Enum(kind) => Value::EnumNumber(kind.values().map(|it| it.number()).max().unwrap()),
        Kind::Message(message) => Value::Message(filled(message, |_| true)),
        other => panic!("{}: {other:?} has no value here yet", field.full_name()),
    }
}

/// A message with the chosen fields set.
fn filled(
    message: &MessageDescriptor,
    chosen: impl Fn(&FieldDescriptor) -> bool,
) -> DynamicMessage {
    let mut made = DynamicMessage::new(message.clone());
    for field in message.fields().filter(|field| chosen(field)) {
        let value = match field.kind() {
            Kind::Message(entry) if field.is_map() => {
                let part = entry.map_entry_value_field();
                let key = MapKey::String("key".into());
                Value::Map([(key, value(&part, &part.kind()))].into())
            }
            kind if field.is_list() => Value::List(vec![value(&field, &kind); 2]),
            kind => value(&field, &kind),
        };
        made.set_field(&field, value);
    }
    made
}

#[test]
fn an_agent_names_only_volumes_of_its_own_pools_and_a_bounded_number() {
    let [own, other] = [1, 2].map(|n| uuid::Uuid::from_u128(n).to_string());
    let small = |pool: &str| NotGrown {
        volume_id: format!("{pool}.{}", uuid::Uuid::from_u128(3)),
        reason: "x".repeat(10_000),
    };
    let mut not_grown = vec![small(&own); 100];
    not_grown.insert(0, small(&other));
    let description = DescribeResponse {
        pools: vec![Pool {
            name: "default".into(),
            id: own.clone(),
            changed_devices: vec!["x".repeat(10_000); 100],
            ..Pool::default()
        }],
        not_grown,
        ..DescribeResponse::default()
    };
    let checked = super::checked::description(description).unwrap();
    let changed = &checked.pools[0].changed_devices;
    assert_eq!(changed.len(), 16);
    assert!(changed.iter().all(|text| text.len() < 5000));
    assert_eq!(checked.not_grown.len(), 64);
    for small in checked.not_grown {
        assert!(small.volume_id.starts_with(&own) && small.reason.len() < 5000);
    }
}

/// The messages that are sent, by name. One of each has every field; of a message with a oneof, there
/// is one for each alternative.
fn messages() -> Vec<(String, DynamicMessage)> {
    let mut made = Vec::new();
    for message in sent_types() {
        let alternatives: Vec<_> = message
            .oneofs()
            .filter(|it| !it.is_synthetic())
            .flat_map(|it| it.fields().collect::<Vec<_>>())
            .collect();
        if alternatives.is_empty() {
            made.push((message.name().to_string(), filled(&message, |_| true)));
        }
        for one in &alternatives {
            let name = format!("{}.{}", message.name(), one.name());
            let is_chosen = |field: &FieldDescriptor| field == one || !alternatives.contains(field);
            made.push((name, filled(&message, is_chosen)));
        }
    }
    made
}

fn definition() -> DescriptorPool {
    let set = include_bytes!(concat!(env!("OUT_DIR"), "/agent.descriptor.bin"));
    DescriptorPool::decode(set.as_slice()).unwrap()
}

/// The types of all requests and responses.
fn sent_types() -> Vec<MessageDescriptor> {
    let definition = definition();
    let methods = definition
        .services()
        .flat_map(|it| it.methods().collect::<Vec<_>>());
    methods
        .flat_map(|method| [method.input(), method.output()])
        .collect()
}

/// Adds the paths of all fields that a type of message has, and its own.
fn add_known(path: &str, message: &MessageDescriptor, found: &mut BTreeSet<String>) {
    found.insert(path.into());
    for field in message.fields() {
        let path = format!("{path}.{}", field.name());
        let kind = match field.kind() {
            Kind::Message(entry) if field.is_map() => entry.map_entry_value_field().kind(),
            kind => kind,
        };
        match kind {
            Kind::Message(part) => add_known(&path, &part, found),
            _ => drop(found.insert(path)),
        }
    }
}

/// Adds the paths of all fields that are set in a message, and its own.
fn add_set(path: &str, message: &DynamicMessage, found: &mut BTreeSet<String>) {
    found.insert(path.into());
    for (field, value) in message.fields() {
        let path = format!("{path}.{}", field.name());
        let values: Vec<_> = match value {
            Value::List(values) => values.iter().collect(),
            Value::Map(values) => values.values().collect(),
            value => vec![value],
        };
        for value in values {
            match value {
                Value::Message(part) => add_set(&path, part, found),
                _ => drop(found.insert(path.clone())),
            }
        }
    }
}

/// The paths of all fields that are set in the files.
fn held() -> BTreeSet<String> {
    let types = sent_types();
    let mut found = BTreeSet::new();
    for file in files("agent").into_values() {
        for line in String::from_utf8(file).unwrap().lines() {
            let (name, sent) = line.split_once(' ').unwrap();
            let name = type_of(name);
            let message = types.iter().find(|it| it.name() == name).unwrap().clone();
            let message = DynamicMessage::decode(message, bytes(sent).as_slice()).unwrap();
            add_set(name, &message, &mut found);
        }
    }
    found
}

/// The type of the message that a line names.
fn type_of(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// The message after this program has decoded and encoded it.
fn sent_again(name: &str, bytes: &[u8]) -> Vec<u8> {
    fn again<T: Message + Default>(bytes: &[u8]) -> Vec<u8> {
        T::decode(bytes).unwrap().encode_to_vec()
    }
    let message = type_of(name);
    macro_rules! by_type {
        ($($kind:ident),* $(,)?) => {
            match message {
                $(stringify!($kind) => again::<$kind>(bytes),)*
                _ => panic!("{message} is no message of this program"),
            }
        };
    }
    by_type!(
        AdoptPoolRequest,
        AdoptPoolResponse,
        ForgetPoolRequest,
        ForgetPoolResponse,
        CheckVolumeRequest,
        CheckVolumeResponse,
        CutRequest,
        CutResponse,
        DeleteGroupRequest,
        DeleteGroupResponse,
        DeleteMovedRequest,
        DeleteMovedResponse,
        DeleteOneRequest,
        DeleteOneResponse,
        DeleteSnapshotRequest,
        DeleteSnapshotResponse,
        DescribeRequest,
        DescribeResponse,
        DescribeVolumesRequest,
        DescribeVolumesResponse,
        ExportRequest,
        ExportResponse,
        FenceRequest,
        FenceResponse,
        FindRequest,
        FindResponse,
        GetGroupRequest,
        GetGroupResponse,
        ImportFileRequest,
        ImportFileResponse,
        ImportRequest,
        ImportResponse,
        LookForMoveRequest,
        LookForMoveResponse,
        LookForRevertRequest,
        LookForRevertResponse,
        OfferRequest,
        OfferResponse,
        ReadRequest,
        ReadResponse,
        ReceiveRequest,
        ReceiveResponse,
        RevertRequest,
        RevertResponse,
        SettleGroupRequest,
        SettleGroupResponse,
        SnapshotForCloneRequest,
        SnapshotForCloneResponse,
        SnapshotForMoveRequest,
        SnapshotForMoveResponse,
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = (0..hex.len()).step_by(2);
    pairs
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

/// One message per line: its name and its bytes in hexadecimal. All lines together have every field of
/// each message. A field, or a message, that is new is added in a new file.
#[test]
fn messages_between_router_and_agents_keep_their_format() {
    let mut held_before = held();
    let mut missing = String::new();
    for (name, message) in messages() {
        let sent = message.encode_to_vec();
        assert_eq!(sent_again(&name, &sent), sent, "{name}");
        let mut set = BTreeSet::new();
        add_set(type_of(&name), &message, &mut set);
        if !set.is_subset(&held_before) {
            missing += &format!("{name} {}\n", hex(&sent));
            held_before.append(&mut set);
        }
    }
    let name = format!("messages-{}.txt", files("agent").len() + 1);
    let expected = match missing.is_empty() {
        true => Vec::new(),
        false => vec![(name.as_str(), missing)],
    };
    let write = |text: &String| -> Vec<u8> {
        let again = text.lines().map(|line| {
            let (name, sent) = line.split_once(' ').unwrap();
            format!("{name} {}\n", hex(&sent_again(name, &bytes(sent))))
        });
        again.collect::<String>().into_bytes()
    };
    check_with("agent", expected, text, write);

    let mut known = BTreeSet::new();
    for message in sent_types() {
        add_known(message.name(), &message, &mut known);
    }
    assert_eq!(held(), known);
}

fn text(file: &[u8]) -> String {
    String::from_utf8(file.to_vec()).unwrap()
}

/// Each field of the protocol, and each value of an enumeration, with its number: two fields of the
/// same type that exchange their numbers leave the bytes of messages as they are.
fn numbers() -> BTreeSet<String> {
    let definition = definition();
    let fields = definition.all_messages().flat_map(|message| {
        let line = |field: FieldDescriptor| {
            let kind = match field.kind() {
                Kind::Message(part) => part.full_name().to_string(),
                Kind::Enum(values) => values.full_name().to_string(),
                plain => format!("{plain:?}").to_lowercase(),
            };
            let cardinality = format!("{:?}", field.cardinality()).to_lowercase();
            format!(
                "{} {} {cardinality} {kind}",
                field.full_name(),
                field.number()
            )
        };
        message.fields().map(line).collect::<Vec<_>>()
    });
    let values = definition.all_enums().flat_map(|it| {
        let line = |value: EnumValueDescriptor| {
            format!("{}.{} {}", it.full_name(), value.name(), value.number())
        };
        it.values().map(line).collect::<Vec<_>>()
    });
    fields.chain(values).collect()
}

/// One field or value per line. New ones are added in a new file.
#[test]
fn fields_between_router_and_agents_keep_their_numbers() {
    let files = files("agent-fields");
    let held: BTreeSet<String> = files
        .values()
        .flat_map(|file| text(file).lines().map(String::from).collect::<Vec<_>>())
        .collect();
    let missing: String = numbers()
        .difference(&held)
        .map(|line| format!("{line}\n"))
        .collect();
    let name = format!("fields-{}.txt", files.len() + 1);
    let expected = match missing.is_empty() {
        true => Vec::new(),
        false => vec![(name.as_str(), missing)],
    };
    // A line that the protocol no longer has is not written, so the file differs.
    let numbers = numbers();
    let write = |text: &String| -> Vec<u8> {
        let kept = text.lines().filter(|line| numbers.contains(*line));
        kept.map(|line| format!("{line}\n"))
            .collect::<String>()
            .into_bytes()
    };
    check_with("agent-fields", expected, text, write);
}
