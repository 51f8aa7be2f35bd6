//! The capabilities that are offered, and proof that no other call is served.

use slackwater::csi::*;
use slackwater::model::Alpha;
use tonic::Code;

use crate::service::calls::Call;
use crate::service::gate::GatedHost;
use crate::service::harness::*;

async fn offered(node: &Node) -> (Vec<String>, Vec<String>) {
    use controller_service_capability::Type as Controller;
    use node_service_capability::Type as OnNode;
    let request = ControllerGetCapabilitiesRequest {};
    let answer = node
        .controller
        .clone()
        .controller_get_capabilities(request)
        .await;
    let controller = answer
        .unwrap()
        .into_inner()
        .capabilities
        .into_iter()
        .map(|c| {
            let Some(Controller::Rpc(rpc)) = c.r#type else {
                panic!("not an rpc")
            };
            rpc.r#type().as_str_name().to_string()
        });
    let controller = controller.collect();
    let answer = node
        .node
        .clone()
        .node_get_capabilities(NodeGetCapabilitiesRequest {})
        .await;
    let on_node = answer
        .unwrap()
        .into_inner()
        .capabilities
        .into_iter()
        .map(|c| {
            let Some(OnNode::Rpc(rpc)) = c.r#type else {
                panic!("not an rpc")
            };
            rpc.r#type().as_str_name().to_string()
        });
    (controller, on_node.collect())
}

#[tokio::test]
async fn stable_capabilities_are_offered_and_alpha_ones_only_if_enabled() {
    let node = Node::start().await;
    let (controller, on_node) = offered(&node).await;
    assert_eq!(
        controller,
        [
            "CREATE_DELETE_VOLUME",
            "PUBLISH_UNPUBLISH_VOLUME",
            "LIST_VOLUMES",
            "GET_CAPACITY",
            "CREATE_DELETE_SNAPSHOT",
            "LIST_SNAPSHOTS",
            "CLONE_VOLUME",
            "EXPAND_VOLUME",
            "MODIFY_VOLUME",
            "SINGLE_NODE_MULTI_WRITER",
        ]
    );
    assert_eq!(
        on_node,
        [
            "STAGE_UNSTAGE_VOLUME",
            "GET_VOLUME_STATS",
            "EXPAND_VOLUME",
            "SINGLE_NODE_MULTI_WRITER"
        ]
    );
    node.stop().await;

    let node = Node::with_alpha(all_alpha()).await;
    let (controller, on_node) = offered(&node).await;
    assert_eq!(
        controller[10..],
        [
            "GET_VOLUME",
            "GET_SNAPSHOT",
            "GET_VOLUME_HEALTH",
            "LIST_VOLUME_HEALTH"
        ]
    );
    assert_eq!(on_node[4..], ["GET_VOLUME_HEALTH", "GET_STORAGE_HEALTH"]);
    node.stop().await;
}

#[tokio::test]
async fn the_driver_reports_its_identity() {
    let node = Node::start().await;
    let info = node
        .identity
        .clone()
        .get_plugin_info(GetPluginInfoRequest {})
        .await;
    let info = info.unwrap().into_inner();
    assert_eq!(info.name, "csi.slackwater.dev");
    assert_eq!(info.vendor_version, env!("CARGO_PKG_VERSION"));
    let probe = node.identity.clone().probe(ProbeRequest {}).await.unwrap();
    assert_eq!(probe.into_inner().ready, Some(true));
    node.stop().await;
}

/// Services by their names, and the kind of volume expansion.
async fn plugin(node: &Node) -> Vec<String> {
    use plugin_capability::Type;
    let request = GetPluginCapabilitiesRequest {};
    let answer = node.identity.clone().get_plugin_capabilities(request).await;
    let all = answer.unwrap().into_inner().capabilities;
    let name = |can: PluginCapability| match can.r#type.unwrap() {
        Type::Service(service) => service.r#type().as_str_name().to_string(),
        Type::VolumeExpansion(expansion) => expansion.r#type().as_str_name().to_string(),
    };
    all.into_iter().map(name).collect()
}

#[tokio::test]
async fn the_plugin_lists_its_services_and_snapshot_topology_only_if_enabled() {
    let stable = [
        "CONTROLLER_SERVICE",
        "VOLUME_ACCESSIBILITY_CONSTRAINTS",
        "GROUP_CONTROLLER_SERVICE",
        "ONLINE",
    ];
    let node = Node::start().await;
    assert_eq!(plugin(&node).await, stable);
    node.stop().await;
    let node = Node::with_alpha("snapshot-topology".parse().unwrap()).await;
    let can = plugin(&node).await;
    assert_eq!(can[..4], stable);
    assert_eq!(can[4..], ["SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"]);
    node.stop().await;
}

#[tokio::test]
async fn groups_are_made_deleted_and_got() {
    use group_controller_service_capability::Type;
    let node = Node::start().await;
    let request = GroupControllerGetCapabilitiesRequest {};
    let mut groups = node.groups.clone();
    let answer = groups.group_controller_get_capabilities(request).await;
    let can = answer.unwrap().into_inner().capabilities;
    let name = |can: GroupControllerServiceCapability| {
        let Type::Rpc(rpc) = can.r#type.unwrap();
        rpc.r#type().as_str_name()
    };
    let can: Vec<_> = can.into_iter().map(name).collect();
    assert_eq!(can, ["CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"]);
    node.stop().await;
}

#[tokio::test]
async fn a_probe_names_what_the_host_lacks() {
    let machine = slackwater::host::memory::MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let node = Node::on(
        machine,
        std::sync::Arc::new(host.clone()),
        Alpha::default(),
        |_| {},
    )
    .await;
    host.set_missing(&[
        "mkfs.xfs is not installed (package xfsprogs)",
        "no /dev/loop-control",
    ]);
    let refused = node
        .identity
        .clone()
        .probe(ProbeRequest {})
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    insta::assert_snapshot!(
        refused.message(),
        @"this host: mkfs.xfs is not installed (package xfsprogs); no /dev/loop-control"
    );
    node.stop().await;
}

#[tokio::test]
async fn alpha_calls_without_their_flag_are_unimplemented_and_with_it_served() {
    let off = Node::start().await;
    let on = Node::with_alpha(all_alpha()).await;
    let gone = async |call: Call| {
        let status = call.clone().send(&off).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{call:?}");
        assert!(status.message().contains("--alpha"), "{status:?}");
        call.send(&on).await.unwrap()
    };
    let id = on.create("v").await.volume_id;
    let get = ControllerGetVolumeRequest {
        volume_id: id.clone(),
    };
    assert!(gone(get.into()).await.contains(&id));
    let cut = on.cut("s", &id).await.snapshot_id;
    let get = GetSnapshotRequest {
        snapshot_id: cut.clone(),
        ..Default::default()
    };
    assert!(gone(get.into()).await.contains(&cut));
    let health = ControllerGetVolumeHealthRequest {
        volume_id: id.clone(),
        ..Default::default()
    };
    assert!(gone(health.into()).await.contains("health_statuses: []"));
    assert!(
        gone(ControllerListVolumeHealthRequest::default().into())
            .await
            .contains(&id)
    );
    let health = NodeGetVolumeHealthRequest {
        volume_id: id.clone(),
        ..Default::default()
    };
    assert!(gone(health.into()).await.contains(&id));
    let storage = gone(NodeGetStorageHealthRequest::default().into()).await;
    assert!(storage.contains("backend_health: []"), "{storage}");
    off.stop().await;
    on.stop().await;
}

#[tokio::test]
async fn snapshot_metadata_is_a_service_of_its_own_and_alpha() {
    for (alpha, code) in [
        (Alpha::default(), Code::Unimplemented),
        (all_alpha(), Code::InvalidArgument),
    ] {
        let node = Node::with_alpha(alpha).await;
        let status = node
            .metadata
            .clone()
            .get_metadata_allocated(GetMetadataAllocatedRequest::default())
            .await
            .unwrap_err();
        assert_eq!(status.code(), code);
        node.stop().await;
    }
}
