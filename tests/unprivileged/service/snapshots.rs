//! The life of a snapshot and of a group through gRPC.

use std::path::Path;

use slackwater::csi::*;
use tonic::Code;

use crate::service::harness::*;

const SECOND_STAGING: &str = "/var/lib/kubelet/staging-2";

pub fn restore(name: &str, snapshot_id: &str) -> CreateVolumeRequest {
    made_from(name, from_snapshot(snapshot_id))
}

pub fn made_from(name: &str, source: volume_content_source::Type) -> CreateVolumeRequest {
    CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource {
            r#type: Some(source),
        }),
        ..create(name)
    }
}

pub fn of_class(name: &str, source: &str, class: &[(&str, &str)]) -> CreateSnapshotRequest {
    let class = class.iter();
    CreateSnapshotRequest {
        parameters: class
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .collect(),
        ..snapshot(name, source)
    }
}

impl Node {
    pub async fn cut(&self, name: &str, source: &str) -> Snapshot {
        let request = snapshot(name, source);
        let answer = self.controller.clone().create_snapshot(request).await;
        answer.unwrap().into_inner().snapshot.unwrap()
    }

    pub async fn make(&self, request: CreateVolumeRequest) -> Volume {
        let answer = self.controller.clone().create_volume(request).await;
        answer.unwrap().into_inner().volume.unwrap()
    }

    pub async fn group(&self, request: CreateVolumeGroupSnapshotRequest) -> VolumeGroupSnapshot {
        let answer = self
            .groups
            .clone()
            .create_volume_group_snapshot(request)
            .await;
        answer.unwrap().into_inner().group_snapshot.unwrap()
    }

    async fn page(&self, request: ListSnapshotsRequest) -> (Vec<Snapshot>, String) {
        let page = self.controller.clone().list_snapshots(request).await;
        let ListSnapshotsResponse {
            entries,
            next_token,
        } = page.unwrap().into_inner();
        let each = entries.into_iter().map(|entry| entry.snapshot.unwrap());
        (each.collect(), next_token)
    }

    pub async fn snapshots(&self) -> Vec<Snapshot> {
        self.page(ListSnapshotsRequest::default()).await.0
    }

    /// What users of a volume read from it.
    pub async fn read(&self, volume_id: &str) -> Vec<u64> {
        let mut kubelet = self.node.clone();
        let stage = NodeStageVolumeRequest {
            staging_target_path: SECOND_STAGING.into(),
            ..stage(volume_id)
        };
        kubelet.node_stage_volume(stage).await.unwrap();
        let tokens = self.host.tokens(Path::new(SECOND_STAGING)).unwrap();
        let unstage = NodeUnstageVolumeRequest {
            staging_target_path: SECOND_STAGING.into(),
            ..unstage(volume_id)
        };
        kubelet.node_unstage_volume(unstage).await.unwrap();
        tokens
    }

    async fn release_and_delete(&self, id: &str) {
        self.unstage(id).await;
        self.delete(id).await;
    }
}

#[tokio::test]
async fn a_snapshot_outlives_its_volume_and_a_restore_its_snapshot() {
    let node = Node::start().await;
    let id = node.staged("pvc-1").await;
    let staging = Path::new(STAGING);
    node.host.write_unsynced(staging, 1).unwrap();
    let cut = node.cut("snapshot-1", &id).await;
    node.host.write_token(staging, 2).unwrap();
    assert_eq!((cut.size_bytes, cut.ready_to_use), (GIB, true));
    assert_eq!(cut.source_volume_id, id);
    assert_eq!(cut.group_snapshot_id, "");
    assert_eq!(cut.accessible_topology, []);
    assert!(cut.creation_time.unwrap().seconds > 0);
    assert_ne!(cut.snapshot_id, id);
    // The same moment at every repeat.
    assert_eq!(node.cut("snapshot-1", &id).await, cut);
    assert_eq!(node.snapshots().await, std::slice::from_ref(&cut));

    let larger = CreateVolumeRequest {
        capacity_range: at_least(2 * GIB),
        ..restore("pvc-2", &cut.snapshot_id)
    };
    let source = larger.volume_content_source.clone();
    let restored = node.make(larger.clone()).await;
    assert_eq!(restored.capacity_bytes, 2 * GIB);
    assert_eq!(restored.content_source, source);
    assert_eq!(
        node.make(larger).await,
        restored,
        "a repeat answers the same"
    );
    assert_eq!(node.read(&restored.volume_id).await, [1]);

    node.release_and_delete(&id).await;
    assert_eq!(node.snapshots().await, std::slice::from_ref(&cut));
    let late = node.make(restore("pvc-3", &cut.snapshot_id)).await;
    assert_eq!(node.read(&late.volume_id).await, [1]);
    for _ in 0..2 {
        node.delete_snapshot(&cut.snapshot_id).await;
    }
    assert_eq!(node.snapshots().await, []);
    assert_eq!(node.read(&late.volume_id).await, [1]);
    assert_eq!(node.read(&restored.volume_id).await, [1]);
    node.stop().await;
}

#[tokio::test]
async fn a_clone_is_a_volume_of_its_own() {
    let node = Node::start().await;
    let id = node.staged("pvc-1").await;
    node.host.write_token(Path::new(STAGING), 1).unwrap();
    let request = CreateVolumeRequest {
        capacity_range: None,
        ..made_from("pvc-2", from_volume(&id))
    };
    let source = request.volume_content_source.clone();
    let cloned = node.make(request.clone()).await;
    node.host.write_token(Path::new(STAGING), 2).unwrap();
    assert_eq!(
        cloned.capacity_bytes, GIB,
        "the source's size, if none is given"
    );
    assert_eq!(cloned.content_source, source);
    assert_eq!(node.make(request).await, cloned);
    assert_eq!(node.snapshots().await, [], "a clone leaves no snapshot");
    node.release_and_delete(&id).await;
    assert_eq!(node.read(&cloned.volume_id).await, [1]);
    node.stop().await;
}

#[tokio::test]
async fn snapshots_are_listed_in_pages_and_by_source() {
    let node = Node::start().await;
    let mut created = Vec::new();
    let (one, other) = (node.create("a").await, node.create("b").await);
    for i in 0..5 {
        let source = if i < 2 { &one } else { &other };
        created.push(node.cut(&format!("s{i}"), &source.volume_id).await);
    }
    let of = |volume_id: &str, snapshot_id: &str| ListSnapshotsRequest {
        source_volume_id: volume_id.into(),
        snapshot_id: snapshot_id.into(),
        ..Default::default()
    };
    let (first, last) = (created[0].clone(), created[4].clone());
    let (found, token) = node.page(of("", &first.snapshot_id)).await;
    assert_eq!((found, token.as_str()), (vec![first.clone()], ""));
    assert_eq!(node.page(of(&one.volume_id, "")).await.0.len(), 2);
    assert_eq!(node.page(of(&other.volume_id, "")).await.0.len(), 3);
    let both = node.page(of(&one.volume_id, &first.snapshot_id)).await;
    assert_eq!(both.0, [first]);
    for nothing in [
        of(&one.volume_id, &last.snapshot_id),
        of("no-such-volume", ""),
        of("", "no-such-snapshot"),
        // A volume is not a snapshot.
        of("", &one.volume_id),
        of(&last.snapshot_id, ""),
    ] {
        assert_eq!(node.page(nothing).await, (vec![], String::new()));
    }

    created.sort_by(|a, b| a.snapshot_id.cmp(&b.snapshot_id));
    let (mut listed, mut starting_token) = (Vec::new(), String::new());
    loop {
        let request = ListSnapshotsRequest {
            max_entries: 2,
            starting_token,
            ..Default::default()
        };
        let (page, next) = node.page(request).await;
        assert!(page.len() <= 2);
        listed.extend(page);
        if next.is_empty() {
            break;
        }
        starting_token = next;
    }
    assert_eq!(listed, created);
    node.stop().await;
}

/// Three volumes in use, so that a snapshot needs a freeze.
pub async fn three(node: &Node) -> Vec<String> {
    let mut ids = Vec::new();
    for i in 0..3_u64 {
        let id = node.create(&format!("pvc-{i}")).await.volume_id;
        let staging = format!("{STAGING}/{i}");
        let stage = NodeStageVolumeRequest {
            staging_target_path: staging.clone(),
            ..stage(&id)
        };
        node.node.clone().node_stage_volume(stage).await.unwrap();
        node.host.write_token(Path::new(&staging), i).unwrap();
        ids.push(id);
    }
    ids
}

/// A class may change between two calls. The parameters of an existing snapshot are not compared,
/// but no caller gets a lower level than its class requires.
#[tokio::test]
async fn a_repeat_with_another_class_is_answered_unless_it_requires_a_higher_level() {
    let node = Node::start().await;
    let used = three(&node).await.remove(0);
    let quiet = node.create("quiet").await.volume_id;
    let ask = async |name: &str, source: &str, class: &[(&str, &str)]| {
        let request = of_class(name, source, class);
        let answer = node.controller.clone().create_snapshot(request).await;
        let answer = answer.map(|created| created.into_inner().snapshot.unwrap());
        answer.map_err(|status| status.code())
    };
    const CRASH: (&str, &str) = ("consistency", "crash");
    const APPLICATION: (&str, &str) = ("consistency", "application");
    let patient = ("freezeTimeout", "20s");
    let lower = |level| ("onQuiesceFailure", level);
    let more = Err(Code::AlreadyExists);

    let created = ask("crash", &used, &[CRASH]).await;
    assert_eq!(ask("crash", &used, &[CRASH, patient]).await, created);
    assert_eq!(ask("crash", &used, &[]).await, more);
    assert_eq!(ask("crash", &used, &[APPLICATION]).await, more);
    let anything = [APPLICATION, lower("crash")];
    assert_eq!(ask("crash", &used, &anything).await, created);

    let created = ask("frozen", &used, &[]).await;
    for class in [
        &[patient][..],
        &[CRASH],
        &[APPLICATION, lower("filesystem")],
    ] {
        assert_eq!(ask("frozen", &used, class).await, created, "{class:?}");
    }
    assert_eq!(ask("frozen", &used, &[APPLICATION]).await, more);

    // The volume is not in use: no application runs, and that is equivalent.
    let created = ask("quiet", &quiet, &[APPLICATION]).await;
    assert!(created.is_ok(), "{created:?}");
    assert_eq!(ask("quiet", &quiet, &[APPLICATION, patient]).await, created);
    assert_eq!(ask("quiet", &quiet, &[]).await, created);

    // A name that is free again can be used.
    let id = ask("crash", &used, &[CRASH]).await.unwrap().snapshot_id;
    node.delete_snapshot(&id).await;
    assert!(ask("crash", &used, &[]).await.is_ok());
    node.stop().await;
}

#[tokio::test]
async fn a_group_is_cut_at_one_moment_and_deleted_as_a_whole() {
    let node = Node::start().await;
    let ids = three(&node).await;
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let alone = node.cut("alone", ids[0]).await;
    let request = CreateVolumeGroupSnapshotRequest {
        parameters: map([
            ("csi.storage.k8s.io/volumegroupsnapshot/name", "nightly"),
            ("csi.storage.k8s.io/volumegroupsnapshot/namespace", "shop"),
        ]),
        ..group("group-1", &ids)
    };
    let created = node.group(request.clone()).await;
    assert!(created.ready_to_use);
    let sources: Vec<_> = created
        .snapshots
        .iter()
        .map(|s| &*s.source_volume_id)
        .collect();
    assert_eq!(sources, ids, "in the order of the request");
    for member in &created.snapshots {
        assert!(member.ready_to_use);
        assert_eq!(member.creation_time, created.creation_time);
        assert_eq!(member.group_snapshot_id, created.group_snapshot_id);
        assert_eq!(member.size_bytes, GIB);
    }
    assert_eq!(node.group(request.clone()).await, created);
    let turned = CreateVolumeGroupSnapshotRequest {
        source_volume_ids: ids.iter().rev().map(|id| id.to_string()).collect(),
        ..request
    };
    assert_eq!(
        node.group(turned).await,
        created,
        "another order is the same group"
    );
    let listed = node.snapshots().await;
    assert_eq!(listed.len(), 4);
    for member in &created.snapshots {
        assert!(listed.contains(member), "listed as it was answered");
    }

    let members: Vec<_> = created
        .snapshots
        .iter()
        .map(|s| s.snapshot_id.clone())
        .collect();
    let get = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: created.group_snapshot_id.clone(),
        snapshot_ids: members.clone(),
        ..Default::default()
    };
    let mut groups = node.groups.clone();
    let got = groups.get_volume_group_snapshot(get.clone()).await.unwrap();
    assert_eq!(got.into_inner().group_snapshot.unwrap(), created);
    let restored = node.make(restore("pvc-r", &members[1])).await;

    let delete = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: created.group_snapshot_id.clone(),
        snapshot_ids: members,
        ..Default::default()
    };
    for _ in 0..2 {
        let request = delete.clone();
        groups.delete_volume_group_snapshot(request).await.unwrap();
    }
    assert_eq!(node.snapshots().await, [alone]);
    let gone = groups.get_volume_group_snapshot(get).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    assert_eq!(node.read(&restored.volume_id).await, [1]);
    node.stop().await;
}

#[tokio::test]
async fn snapshots_report_their_topology_only_if_enabled() {
    let elsewhere = Topology {
        segments: map([("topology.csi.slackwater.dev/home", "another")]),
    };
    let only = |topology: &Topology| {
        Some(TopologyRequirement {
            requisite: vec![topology.clone()],
            preferred: vec![],
        })
    };
    let node = Node::start().await;
    let id = node.create("v").await.volume_id;
    // A field that this version of the protocol lacks has no effect.
    let request = CreateSnapshotRequest {
        accessibility_requirements: only(&elsewhere),
        ..snapshot("s", &id)
    };
    let mut controller = node.controller.clone();
    let created = controller.create_snapshot(request.clone()).await.unwrap();
    let created = created.into_inner().snapshot.unwrap();
    assert_eq!(created.accessible_topology, []);
    node.stop().await;

    let node = Node::with_alpha(all_alpha()).await;
    let id = node.create("v").await.volume_id;
    let info = node.node.clone().node_get_info(NodeGetInfoRequest {}).await;
    let here = info.unwrap().into_inner().accessible_topology.unwrap();
    let request = |topology: &Topology| CreateSnapshotRequest {
        accessibility_requirements: only(topology),
        ..snapshot("s", &id)
    };
    let mut controller = node.controller.clone();
    let refused = controller.create_snapshot(request(&elsewhere)).await;
    assert_eq!(refused.unwrap_err().code(), Code::ResourceExhausted);
    let created = controller.create_snapshot(request(&here)).await.unwrap();
    let created = created.into_inner().snapshot.unwrap();
    assert_eq!(created.accessible_topology, std::slice::from_ref(&here));
    assert_eq!(node.snapshots().await, std::slice::from_ref(&created));
    let get = GetSnapshotRequest {
        snapshot_id: created.snapshot_id.clone(),
        ..Default::default()
    };
    let got = controller.get_snapshot(get).await.unwrap();
    assert_eq!(got.into_inner().snapshot.unwrap(), created);
    let grouped = node.group(group("g", &[&id])).await;
    assert_eq!(grouped.snapshots[0].accessible_topology, [here]);
    node.stop().await;
}

/// The owner of the claim decides whose hooks run. It is not an attribute of the volume.
#[tokio::test]
async fn the_claim_of_a_volume_is_recorded_and_never_compared() {
    let node = Node::start().await;
    let of = |claim: &str| CreateVolumeRequest {
        parameters: map([
            ("csi.storage.k8s.io/pvc/namespace", "shop"),
            ("csi.storage.k8s.io/pvc/name", claim),
        ]),
        ..create("pvc-1")
    };
    let created = node.make(of("db")).await;
    assert_eq!(node.make(of("other")).await, created);
    assert_eq!(node.make(create("pvc-1")).await, created);
    let uuid = created.volume_id.split_once('.').unwrap().1;
    let record = format!("/memory/default/volumes/{uuid}/record.json");
    let record = node.driver_file(&record);
    assert!(record.contains("\"shop/db\""), "{record}");
    node.stop().await;
}
