//! The life of a volume through gRPC, with the answers that callers depend on.

use slackwater::csi::*;
use slackwater::model::Alpha;
use tonic::Code;

use crate::service::harness::*;

#[tokio::test]
async fn a_volume_lives_from_create_to_delete() {
    let node = Node::start().await;
    let mut controller = node.controller.clone();
    let mut kubelet = node.node.clone();

    let volume = node.create("pvc-1").await;
    assert_eq!(volume.capacity_bytes, GIB);
    assert_eq!(volume.volume_context, map([]));
    assert_eq!(volume.accessible_topology.len(), 1);
    let info = kubelet
        .node_get_info(NodeGetInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(info.node_id, NODE);
    assert_eq!(info.max_volumes_per_node, 0, "no limit");
    assert_eq!(
        info.accessible_topology.as_ref(),
        volume.accessible_topology.first()
    );
    let id = volume.volume_id.clone();

    let attach = ControllerPublishVolumeRequest {
        volume_id: id.clone(),
        node_id: NODE.to_string(),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    controller.controller_publish_volume(attach).await.unwrap();
    kubelet.node_stage_volume(stage(&id)).await.unwrap();
    kubelet.node_stage_volume(stage(&id)).await.unwrap();
    kubelet
        .node_publish_volume(publish(&id, TARGET))
        .await
        .unwrap();
    kubelet
        .node_publish_volume(publish(&id, TARGET))
        .await
        .unwrap();

    let stats = NodeGetVolumeStatsRequest {
        volume_id: id.clone(),
        volume_path: TARGET.to_string(),
        ..Default::default()
    };
    let usage = kubelet
        .node_get_volume_stats(stats)
        .await
        .unwrap()
        .into_inner()
        .usage;
    assert_eq!(usage[0].unit(), volume_usage::Unit::Bytes);
    assert!(usage[0].total > 0 && usage[0].available > 0);

    // Exactly the requested size, although no image has such a length.
    let odd = 2 * GIB + 1;
    let grow = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: at_least(odd),
        ..Default::default()
    };
    let grown = controller
        .controller_expand_volume(grow)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (grown.capacity_bytes, grown.node_expansion_required),
        (odd, true)
    );
    // As csi-sanity does it: without capability, staging path and secrets.
    let grow = NodeExpandVolumeRequest {
        volume_id: id.clone(),
        volume_path: TARGET.to_string(),
        ..Default::default()
    };
    let grown = kubelet.node_expand_volume(grow).await.unwrap().into_inner();
    assert_eq!(grown.capacity_bytes, odd);

    for _ in 0..2 {
        kubelet.node_unpublish_volume(unpublish(&id)).await.unwrap();
    }
    assert!(
        node.host
            .mounted()
            .iter()
            .all(|path| path != std::path::Path::new(TARGET))
    );
    for _ in 0..2 {
        kubelet.node_unstage_volume(unstage(&id)).await.unwrap();
    }
    for _ in 0..2 {
        let detach = ControllerUnpublishVolumeRequest {
            volume_id: id.clone(),
            ..Default::default()
        };
        controller
            .controller_unpublish_volume(detach)
            .await
            .unwrap();
    }
    for _ in 0..2 {
        controller.delete_volume(delete(&id)).await.unwrap();
    }
    assert_eq!(node.driver.pools.locks_held(), 0);
    node.stop().await;
}

fn unpublish(id: &str) -> NodeUnpublishVolumeRequest {
    NodeUnpublishVolumeRequest {
        volume_id: id.to_string(),
        target_path: TARGET.to_string(),
    }
}

#[tokio::test]
async fn a_size_is_reported_as_it_was_asked_for() {
    let node = Node::start().await;
    for (name, asked, reported) in [
        ("exact", range(5_000_001, 5_000_001), 5_000_001),
        ("least", at_least(3 * MIB + 7), 3 * MIB + 7),
        ("nothing", None, GIB),
        ("empty", range(0, 0), GIB),
        ("limit", range(0, 10 * MIB), 10 * MIB),
    ] {
        let request = CreateVolumeRequest {
            capacity_range: asked,
            ..create(name)
        };
        let repeat = request.clone();
        let created = node
            .controller
            .clone()
            .create_volume(request)
            .await
            .unwrap();
        let volume = created.into_inner().volume.unwrap();
        assert_eq!(volume.capacity_bytes, reported, "{name}");
        let again = node.controller.clone().create_volume(repeat).await.unwrap();
        assert_eq!(again.into_inner().volume.unwrap(), volume, "{name}");
    }
    node.stop().await;
}

#[tokio::test]
async fn names_may_be_long_and_in_any_script() {
    let node = Node::start().await;
    let mut ids = Vec::new();
    for name in [
        "x".repeat(128),
        "潮止まり".repeat(10),
        "a\tb\nc".into(),
        "../../etc".into(),
    ] {
        ids.push(node.create(&name).await.volume_id);
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    node.stop().await;
}

#[tokio::test]
async fn a_list_changes_by_exactly_the_created_volumes() {
    let node = Node::start().await;
    let mut controller = node.controller.clone();
    let mut created = Vec::new();
    for i in 0..5 {
        created.push(node.create(&format!("v{i}")).await.volume_id);
    }
    created.sort();
    let (mut listed, mut token) = (Vec::new(), String::new());
    loop {
        let request = ListVolumesRequest {
            max_entries: 2,
            starting_token: token,
        };
        let page = controller.list_volumes(request).await.unwrap().into_inner();
        assert!(page.entries.len() <= 2);
        listed.extend(
            page.entries
                .into_iter()
                .map(|entry| entry.volume.unwrap().volume_id),
        );
        token = page.next_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(listed, created);
    let all = controller
        .list_volumes(ListVolumesRequest::default())
        .await
        .unwrap();
    assert_eq!(all.into_inner().entries.len(), 5);
    node.stop().await;
}

#[tokio::test]
async fn a_validation_confirms_the_capabilities_or_gives_the_reason() {
    let node = Node::start().await;
    let id = node.create("v").await.volume_id;
    let ask = |capability: VolumeCapability, parameters: &str| ValidateVolumeCapabilitiesRequest {
        volume_id: id.clone(),
        volume_capabilities: vec![capability],
        parameters: map([("allocation", parameters)]),
        volume_context: map([("a", "b")]),
        ..Default::default()
    };
    let verdict = async |request: ValidateVolumeCapabilitiesRequest| {
        let mut controller = node.controller.clone();
        let verdict = controller.validate_volume_capabilities(request).await;
        verdict.unwrap().into_inner()
    };
    let request = ask(mount(), "thin");
    let yes = verdict(request.clone()).await;
    let confirmed = yes.confirmed.unwrap();
    assert_eq!(confirmed.volume_capabilities, request.volume_capabilities);
    assert_eq!(confirmed.parameters, request.parameters);
    assert_eq!(confirmed.volume_context, request.volume_context);

    let many = VolumeCapability {
        access_mode: mode(volume_capability::access_mode::Mode::MultiNodeMultiWriter),
        ..mount()
    };
    for request in [
        ask(many, "thin"),
        ask(mount_as("ntfs", &[]), "thin"),
        ask(mount(), "fat"),
    ] {
        let no = verdict(request).await;
        assert!(no.confirmed.is_none());
        assert!(no.message.contains(": "), "{}", no.message);
    }
    node.stop().await;
}

#[tokio::test]
async fn capacity_is_reported_and_is_zero_elsewhere_and_for_pools_that_are_not_served() {
    let node = Node::start().await;
    let mut controller = node.controller.clone();
    let mut ask = async |request| controller.get_capacity(request).await.unwrap().into_inner();
    let here = ask(GetCapacityRequest::default()).await;
    assert!(here.available_capacity > GIB);
    assert!(here.maximum_volume_size.unwrap() > GIB);
    let elsewhere = Topology {
        segments: map([("topology.csi.slackwater.dev/home", "another")]),
    };
    let foreign = Topology {
        segments: map([("kubernetes.io/hostname", NODE)]),
    };
    for topology in [elsewhere, foreign] {
        let request = GetCapacityRequest {
            accessible_topology: Some(topology),
            ..Default::default()
        };
        assert_eq!(ask(request).await.available_capacity, 0);
    }
    let many = VolumeCapability {
        access_mode: mode(volume_capability::access_mode::Mode::MultiNodeMultiWriter),
        ..mount()
    };
    let request = GetCapacityRequest {
        volume_capabilities: vec![many],
        ..Default::default()
    };
    assert_eq!(ask(request).await.available_capacity, 0);
    let home = Topology {
        segments: map([(
            node.driver.pools.topology_key().as_str(),
            node.driver.pools.home().to_string().as_str(),
        )]),
    };
    let request = GetCapacityRequest {
        accessible_topology: Some(home),
        ..Default::default()
    };
    assert_eq!(ask(request).await, here);
    node.stop().await;
}

#[tokio::test]
async fn mutable_parameters_override_the_class() {
    let node = Node::start().await;
    let created = async |class: &str, mutable: Option<&str>| {
        let request = CreateVolumeRequest {
            parameters: map([("wipe", class)]),
            mutable_parameters: mutable
                .map(|wipe| map([("wipe", wipe)]))
                .unwrap_or_default(),
            ..create("v")
        };
        let created = node.controller.clone().create_volume(request).await;
        created.map(drop).map_err(|status| status.code())
    };
    assert_eq!(created("discard", Some("none")).await, Ok(()));
    // The same as a class with this value.
    assert_eq!(created("none", None).await, Ok(()));
    assert_eq!(created("discard", None).await, Err(Code::AlreadyExists));
    node.stop().await;
}

#[tokio::test]
async fn an_inline_volume_lives_with_its_pod() {
    let node = Node::start().await;
    let mut kubelet = node.node.clone();
    let id = "csi-0123456789abcdef";
    let request = NodePublishVolumeRequest {
        staging_target_path: String::new(),
        volume_context: map([
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "db-0"),
            ("size", "64Mi"),
        ]),
        ..publish(id, TARGET)
    };
    for _ in 0..2 {
        kubelet.node_publish_volume(request.clone()).await.unwrap();
    }
    assert_eq!(node.host.mounted(), [std::path::PathBuf::from(TARGET)]);
    // Only its pod names it in the cluster. A search for orphans recognizes it by this.
    let mut controller = node.controller.clone();
    let there = controller.list_volumes(ListVolumesRequest::default()).await;
    let there = there.unwrap().into_inner().entries.remove(0);
    let context = there.volume.unwrap().volume_context;
    assert_eq!(context, map([("csi.storage.k8s.io/ephemeral", "true")]));
    for _ in 0..2 {
        kubelet.node_unpublish_volume(unpublish(id)).await.unwrap();
    }
    assert!(node.host.mounted().is_empty());
    let left = node
        .controller
        .clone()
        .list_volumes(ListVolumesRequest::default())
        .await;
    assert!(left.unwrap().into_inner().entries.is_empty());
    node.stop().await;
}

#[tokio::test]
async fn the_maximum_number_of_volumes_is_reported_to_the_scheduler() {
    let node = Node::with(Alpha::default(), |settings| {
        settings.max_volumes = std::num::NonZeroU16::new(100);
    })
    .await;
    let info = node.node.clone().node_get_info(NodeGetInfoRequest {}).await;
    assert_eq!(info.unwrap().into_inner().max_volumes_per_node, 100);
}
