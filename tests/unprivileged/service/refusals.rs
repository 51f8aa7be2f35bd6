//! Invalid requests: they return INVALID_ARGUMENT, with a sentence that names the field. The
//! sentences are part of `docs/errors.md` (see `codes`).

mod cases;

use slackwater::csi::*;
use tonic::Code;

use crate::service::calls::Call;
use crate::service::harness::*;
pub use cases::all;
use cases::created;

#[tokio::test]
async fn an_invalid_request_is_an_invalid_argument_and_changes_nothing() {
    let node = Node::start().await;
    let effects = node.host.effects();
    for (what, call) in all() {
        let rpc = call.rpc();
        let status = call.send(&node).await.unwrap_err();
        assert_eq!(
            status.code(),
            Code::InvalidArgument,
            "{rpc}, {what}: {status:?}"
        );
        assert!(
            status.message().contains(": "),
            "{rpc}, {what}: {}",
            status.message()
        );
        assert!(status.details().is_empty());
    }
    assert_eq!(node.host.effects(), effects);
    node.stop().await;
}

#[tokio::test]
async fn an_invalid_id_is_not_found_or_already_deleted() {
    let node = Node::start().await;
    let long = "y".repeat(100_000);
    for id in ["no-such-volume", "../../../etc/passwd", "ä\u{0}b", &long] {
        let volume_id = || id.to_string();
        let path = "some/path".to_string();
        let missing: [Call; 5] = [
            ControllerExpandVolumeRequest {
                volume_id: volume_id(),
                capacity_range: at_least(GIB),
                ..Default::default()
            }
            .into(),
            stage(id).into(),
            publish(id, TARGET).into(),
            NodeGetVolumeStatsRequest {
                volume_id: volume_id(),
                volume_path: path.clone(),
                ..Default::default()
            }
            .into(),
            NodeExpandVolumeRequest {
                volume_id: volume_id(),
                volume_path: path.clone(),
                ..Default::default()
            }
            .into(),
        ];
        for call in missing {
            let rpc = call.rpc();
            let status = call.send(&node).await.unwrap_err();
            assert_eq!(status.code(), Code::NotFound, "{rpc}: {status:?}");
        }
        let gone: [Call; 4] = [
            delete(&volume_id()).into(),
            ControllerUnpublishVolumeRequest {
                volume_id: volume_id(),
                ..Default::default()
            }
            .into(),
            unstage(&volume_id()).into(),
            NodeUnpublishVolumeRequest {
                volume_id: volume_id(),
                target_path: TARGET.into(),
            }
            .into(),
        ];
        for call in gone {
            call.send(&node).await.unwrap();
        }
    }
    node.stop().await;
}

#[tokio::test]
async fn parameters_of_the_sidecars_are_ignored() {
    let node = Node::start().await;
    let call = created(|r| {
        r.parameters = map([
            ("csi.storage.k8s.io/fstype", "zfs"),
            ("csi.storage.k8s.io/pvc/name", "claim"),
        ]);
    });
    call.send(&node).await.unwrap();
    node.stop().await;
}
