//! Checks messages as an earlier release has sent them, with every field set: this program parses
//! them and encodes them to the same bytes. Router and agents are of different releases during an
//! upgrade.

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, Value};

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
    message: &prost_reflect::MessageDescriptor,
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

/// All messages that are sent, by name; one for each alternative of a oneof.
fn messages() -> Vec<(String, Vec<u8>)> {
    let set = include_bytes!(concat!(env!("OUT_DIR"), "/agent.descriptor.bin"));
    let pool = DescriptorPool::decode(set.as_slice()).unwrap();
    let methods = pool
        .services()
        .flat_map(|it| it.methods().collect::<Vec<_>>());
    let mut made = Vec::new();
    for message in methods.flat_map(|method| [method.input(), method.output()]) {
        let alternatives: Vec<_> = message
            .oneofs()
            .flat_map(|it| it.fields().collect::<Vec<_>>())
            .collect();
        if alternatives.is_empty() {
            made.push((message.name().to_string(), filled(&message, |_| true)));
        }
        for one in alternatives {
            let name = format!("{}.{}", message.name(), one.name());
            made.push((name, filled(&message, |field| *field == one)));
        }
    }
    made.into_iter()
        .map(|(name, made)| (name, made.encode_to_vec()))
        .collect()
}

/// The message after this program has decoded and encoded it.
fn sent_again(name: &str, bytes: &[u8]) -> Vec<u8> {
    fn again<T: Message + Default>(bytes: &[u8]) -> Vec<u8> {
        T::decode(bytes).unwrap().encode_to_vec()
    }
    let message = name.split('.').next().unwrap_or(name);
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

/// One message per line: its name and its bytes in hexadecimal. A message that gets new fields gets
/// no new line; a new message is added in a new file.
#[test]
fn messages_between_router_and_agents_keep_their_format() {
    let mut lines = String::new();
    for (name, sent) in messages() {
        assert_eq!(sent_again(&name, &sent), sent, "{name}");
        lines += &format!("{name} {}\n", hex(&sent));
    }
    let read = |file: &[u8]| String::from_utf8(file.to_vec()).unwrap();
    let write = |text: &String| -> Vec<u8> {
        let again = text.lines().map(|line| {
            let (name, sent) = line.split_once(' ').unwrap();
            format!("{name} {}\n", hex(&sent_again(name, &bytes(sent))))
        });
        again.collect::<String>().into_bytes()
    };
    let files = files("agent");
    let held: String = files.values().map(|file| read(file)).collect();
    let is_held = |line: &&str| {
        let (name, _) = line.split_once(' ').unwrap();
        held.lines()
            .any(|held| held.split_once(' ').unwrap().0 == name)
    };
    let missing: String = lines
        .lines()
        .filter(|line| !is_held(line))
        .map(|line| format!("{line}\n"))
        .collect();
    let name = format!("messages-{}.txt", files.len() + 1);
    let expected = match missing.is_empty() {
        true => Vec::new(),
        false => vec![(name.as_str(), missing)],
    };
    check_with("agent", expected, read, write);
}
