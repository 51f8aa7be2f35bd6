//! Options that stop the machine or skip recovery: refused for new volumes, and removed from
//! volumes that an earlier release has created.

use slackwater::csi::*;
use slackwater::host::Host;
use tonic::Code;

use crate::service::harness::*;

const FLAGS: [&str; 5] = [
    "errors=panic",
    "fatal_errors=panic",
    "noload",
    "nologreplay",
    "rescue=all",
];

fn inline(id: &str, flags: &[&str]) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        staging_target_path: String::new(),
        volume_capability: Some(mount_as("ext4", flags)),
        volume_context: map([("csi.storage.k8s.io/ephemeral", "true"), ("size", "64Mi")]),
        ..publish(id, TARGET)
    }
}

fn refusal(status: tonic::Status, word: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let message = status.message();
    assert!(message.contains(word), "{message}");
    assert!(!message.contains("panic"), "no value: {message}");
}

#[tokio::test]
async fn new_volumes_with_harmful_options_are_refused() {
    let node = Node::start().await;
    let create_with = async |request| {
        let refused = node.controller.clone().create_volume(request).await;
        refused.unwrap_err()
    };
    for flag in FLAGS {
        let key = flag.split('=').next().unwrap();
        let request = CreateVolumeRequest {
            volume_capabilities: vec![mount_as("ext4", &["noatime", flag])],
            ..create("v")
        };
        refusal(create_with(request).await, key);
        let publish = node
            .node
            .clone()
            .node_publish_volume(inline("csi-1", &[flag]))
            .await;
        refusal(publish.unwrap_err(), key);
    }
    for options in ["-e panic", "-O ^has_journal"] {
        let request = CreateVolumeRequest {
            parameters: map([("mkfsOptions", options)]),
            ..create("v")
        };
        refusal(create_with(request).await, "parameters.mkfsOptions");
    }
    assert!(node.host.mounted().is_empty());
    node.stop().await;
}

#[tokio::test]
async fn volumes_of_an_earlier_release_are_staged_without_harmful_options() {
    let node = Node::start().await;
    let id = node.create("v").await.volume_id;
    let uuid = id.split('.').nth(1).unwrap();
    let record = format!("/memory/default/volumes/{uuid}/record.json");
    // As an earlier release wrote it.
    let mut found: serde_json::Value = serde_json::from_str(&node.driver_file(&record)).unwrap();
    found["mkfs_options"] = serde_json::json!(["-e", "panic"]);
    node.host
        .put_file(record.as_ref(), found.to_string().as_bytes())
        .unwrap();
    let folder = node.folder.path().to_path_buf();
    let host = node.host.clone();
    node.stop().await;
    drop(folder);
    let node = Node::on(
        host.restart_process(),
        std::sync::Arc::new(host.restart_process()),
        Default::default(),
        |_| {},
    )
    .await;
    for flags in [&["errors=panic", "noload", "noatime"][..], &["noatime"]] {
        let request = NodeStageVolumeRequest {
            volume_capability: Some(mount_as("ext4", flags)),
            ..stage(&id)
        };
        for _ in 0..2 {
            node.node
                .clone()
                .node_stage_volume(request.clone())
                .await
                .unwrap();
        }
        let mounts = node.host.without_faults(|host| host.mounts().unwrap());
        let options = mounts.last().unwrap().super_options.clone();
        assert!(
            options.contains("errors=remount-ro"),
            "{flags:?}: {options}"
        );
        assert!(
            !options.contains("panic") && !options.contains("noload"),
            "{options}"
        );
        node.unstage(&id).await;
    }
    node.stop().await;
}

/// A repeat finds an existing inline volume, whatever options it was created with.
#[tokio::test]
async fn an_inline_volume_of_an_earlier_release_stays_published() {
    let node = Node::start().await;
    let publish = async |flags: &[&str]| {
        let published = node
            .node
            .clone()
            .node_publish_volume(inline("csi-1", flags))
            .await;
        published.map(drop)
    };
    publish(&[]).await.unwrap();
    publish(&["errors=panic"]).await.unwrap();
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: "csi-1".into(),
        target_path: TARGET.into(),
    };
    node.node
        .clone()
        .node_unpublish_volume(unpublish)
        .await
        .unwrap();
    node.stop().await;
}
