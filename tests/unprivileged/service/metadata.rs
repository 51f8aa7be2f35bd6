//! Change tracking through gRPC: streams of ranges.

use std::path::Path;

use slackwater::csi::*;
use slackwater::model::Alpha;
use slackwater::operation::GetMetadata;
use tonic::{Code, Status, Streaming};

use crate::service::harness::*;

/// The fields of a message besides its ranges, and the ranges.
type Message = (i32, i64, Vec<(i64, i64)>);

async fn all<T>(
    stream: Result<tonic::Response<Streaming<T>>, Status>,
    say: fn(T) -> (i32, i64, Vec<BlockMetadata>),
) -> Result<Vec<Message>, Status> {
    let mut stream = stream?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        let (kind, capacity, blocks) = say(message);
        let ranges = blocks.iter().map(|b| (b.byte_offset, b.size_bytes));
        messages.push((kind, capacity, ranges.collect()));
    }
    Ok(messages)
}

impl Node {
    async fn metadata_node() -> Node {
        Node::with_alpha("snapshot-metadata".parse::<Alpha>().unwrap()).await
    }

    async fn allocated(
        &self,
        request: GetMetadataAllocatedRequest,
    ) -> Result<Vec<Message>, Status> {
        let stream = self.metadata.clone().get_metadata_allocated(request).await;
        all(stream, |m| {
            (
                m.block_metadata_type,
                m.volume_capacity_bytes,
                m.block_metadata,
            )
        })
        .await
    }

    async fn delta(&self, request: GetMetadataDeltaRequest) -> Result<Vec<Message>, Status> {
        let stream = self.metadata.clone().get_metadata_delta(request).await;
        all(stream, |m| {
            (
                m.block_metadata_type,
                m.volume_capacity_bytes,
                m.block_metadata,
            )
        })
        .await
    }

    /// Cuts a staged volume after a write.
    async fn written_and_cut(&self, name: &str, volume_id: &str, token: u64) -> String {
        self.host.write_token(Path::new(STAGING), token).unwrap();
        self.cut(name, volume_id).await.snapshot_id
    }
}

fn of(snapshot_id: &str) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest {
        snapshot_id: snapshot_id.to_string(),
        ..Default::default()
    }
}

fn between(base: &str, target: &str) -> GetMetadataDeltaRequest {
    GetMetadataDeltaRequest {
        base_snapshot_id: base.to_string(),
        target_snapshot_id: target.to_string(),
        ..Default::default()
    }
}

fn ranges(messages: &[Message]) -> Vec<(i64, i64)> {
    messages
        .iter()
        .flat_map(|(_, _, ranges)| ranges.clone())
        .collect()
}

#[tokio::test]
async fn ranges_are_streamed_and_can_be_resumed_at_any_offset() {
    let node = Node::metadata_node().await;
    let volume = node.staged("pvc-1").await;
    let first = node.written_and_cut("s1", &volume, 1).await;
    let second = node.written_and_cut("s2", &volume, 2).await;

    let whole = node.allocated(of(&second)).await.unwrap();
    let all = ranges(&whole);
    assert!(!all.is_empty());
    assert!(all.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
    let variable = i32::from(BlockMetadataType::VariableLength);
    let fields_of = |messages: &[Message]| {
        messages
            .iter()
            .all(|(kind, capacity, _)| (*kind, *capacity) == (variable, GIB))
    };
    assert!(fields_of(&whole));

    let changed = node.delta(between(&first, &second)).await.unwrap();
    assert!(fields_of(&changed));
    let differing = ranges(&changed);
    assert!(!differing.is_empty());
    let sum = |ranges: &[(i64, i64)]| ranges.iter().map(|(_, bytes)| bytes).sum::<i64>();
    assert!(sum(&differing) < sum(&all), "{differing:?} of {all:?}");
    // The same in the other direction. There is no difference between a snapshot and itself.
    let back = node.delta(between(&second, &first)).await.unwrap();
    assert_eq!(ranges(&back), differing);
    let none = node.delta(between(&first, &first)).await.unwrap();
    assert_eq!(none, [(variable, GIB, vec![])]);

    let one_each = GetMetadataAllocatedRequest {
        max_results: 1,
        ..of(&second)
    };
    let messages = node.allocated(one_each).await.unwrap();
    assert!(messages.iter().all(|(_, _, ranges)| ranges.len() == 1));
    assert_eq!(ranges(&messages), all);

    for (offset, bytes) in &all {
        for starting_offset in [*offset, offset + 1, offset + bytes - 1, offset + bytes] {
            let request = GetMetadataAllocatedRequest {
                starting_offset,
                ..of(&second)
            };
            let rest = ranges(&node.allocated(request).await.unwrap());
            let expected: Vec<_> = all
                .iter()
                .filter(|(offset, bytes)| offset + bytes > starting_offset)
                .collect();
            assert_eq!(rest.len(), expected.len());
            for ((start, bytes), (offset, all)) in rest.iter().zip(expected) {
                assert_eq!(
                    start + bytes,
                    offset + all,
                    "it ends where the whole stream ends"
                );
                assert!(start >= offset && *start <= starting_offset.max(*offset));
            }
        }
    }
    let at_the_end = GetMetadataAllocatedRequest {
        starting_offset: GIB,
        ..of(&second)
    };
    assert_eq!(
        node.allocated(at_the_end).await.unwrap(),
        [(variable, GIB, vec![])]
    );
    node.stop().await;
}

#[tokio::test]
async fn an_invalid_metadata_request_fails_the_call_itself() {
    let node = Node::metadata_node().await;
    let volume = node.staged("pvc-1").await;
    let cut = node.written_and_cut("s1", &volume, 1).await;
    let other = node.create("pvc-2").await.volume_id;
    let other = node.cut("s2", &other).await.snapshot_id;

    let allocated = |change: fn(&mut GetMetadataAllocatedRequest)| {
        let mut request = of(&cut);
        change(&mut request);
        node.allocated(request)
    };
    let nothing = allocated(|request| request.snapshot_id.clear()).await;
    let unknown = allocated(|request| request.snapshot_id = "unknown".into()).await;
    let unknown_uuid = allocated(|request| {
        request.snapshot_id.pop();
        let end = if request.snapshot_id.ends_with('0') {
            "1"
        } else {
            "0"
        };
        request.snapshot_id.push_str(end);
        request.snapshot_id.replace_range(40..42, "00");
    })
    .await;
    let before = allocated(|request| request.starting_offset = -1).await;
    let beyond = allocated(|request| request.starting_offset = GIB + 1).await;
    let fewer = allocated(|request| request.max_results = -1).await;
    let no_base = node.delta(between("", &cut)).await;
    let no_target = node.delta(between(&cut, "")).await;
    let unknown_base = node.delta(between("unknown", &cut)).await;
    let unrelated = node.delta(between(&other, &cut)).await;
    for (answer, code, said) in [
        (nothing, Code::InvalidArgument, "snapshot_id: is missing"),
        (unknown, Code::NotFound, "snapshot unknown"),
        (unknown_uuid, Code::NotFound, "does not exist"),
        (before, Code::OutOfRange, "starting_offset: -1"),
        (beyond, Code::OutOfRange, "starting_offset: 1073741825"),
        (fewer, Code::InvalidArgument, "max_results: is -1"),
        (
            no_base,
            Code::InvalidArgument,
            "base_snapshot_id: is missing",
        ),
        (
            no_target,
            Code::InvalidArgument,
            "target_snapshot_id: is missing",
        ),
        (unknown_base, Code::NotFound, "snapshot unknown"),
        (unrelated, Code::InvalidArgument, "base_snapshot_id: "),
    ] {
        let status = answer.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(said), "{status:?}");
    }
    node.stop().await;
}

#[tokio::test]
async fn a_volume_whose_name_was_reused_is_another_volume() {
    let node = Node::metadata_node().await;
    let volume = node.staged("pvc-1").await;
    let first = node.written_and_cut("s1", &volume, 1).await;
    node.unstage(&volume).await;
    node.delete(&volume).await;
    assert_eq!(node.create("pvc-1").await.volume_id, volume);
    let second = node.cut("s2", &volume).await.snapshot_id;
    let status = node.delta(between(&first, &second)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    node.stop().await;
}

#[tokio::test]
async fn pages_are_never_of_two_snapshots_that_had_one_id() {
    let node = Node::metadata_node().await;
    let volume = node.staged("pvc-1").await;
    let id = node.written_and_cut("s1", &volume, 1).await;
    let ask = GetMetadata {
        base_snapshot_id: None,
        snapshot_id: id.clone(),
        starting_offset: 0,
        max_results: 1,
        of: None,
    };
    let page = node.driver.snapshots.snapshot_metadata(&ask).unwrap();
    let next = GetMetadata {
        of: Some(page.of),
        ..ask
    };
    let again = node.driver.snapshots.snapshot_metadata(&next);
    assert_eq!(again.unwrap().of, page.of);
    node.delete_snapshot(&id).await;
    assert_eq!(node.cut("s1", &volume).await.snapshot_id, id);
    let error = node.driver.snapshots.snapshot_metadata(&next).unwrap_err();
    assert!(error.to_string().contains("recreated"), "{error}");
    node.stop().await;
}
