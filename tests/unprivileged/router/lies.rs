//! A compromised node: its agent has its own certificate and disks, and gives arbitrary answers.
//! Whatever it answers, volumes of other nodes are unchanged, and remain usable.

use std::time::Duration;

use prost::Message;
use slackwater::agent::{
    CutResponse, DescribeResponse, FindResponse, GetGroupResponse, GroupMember, Pool, cut_response,
    group_member,
};
use slackwater::csi::*;
use slackwater::model::PoolId;
use slackwater::router::cluster::{KnownPool, ObjectRef};
use slackwater_testkit::Sweep;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::router::cluster::*;
use crate::router::liar::{Kind, Liar, Lie, LieKind};
use crate::service::harness::*;

/// A call that takes longer hangs.
const LONG: Duration = Duration::from_secs(60);

/// Node a has a victim's volume, snapshot and group; the agent of node b lies.
struct Fixture {
    a: AgentNode,
    b: AgentNode,
    liar: Liar,
    _lying: Served,
    routed: TestRouter,
    victim: String,
    snapshot: String,
    group: VolumeGroupSnapshot,
    /// A volume of node b, with a snapshot.
    own: String,
    own_snapshot: String,
    rounds: usize,
}

fn known(peer: &AgentNode) -> KnownPool {
    KnownPool {
        id: peer.pool_id(),
        name: "default".into(),
        node: peer.name.clone(),
        home: peer.home(),
        lost: false,
    }
}

/// As csi-snapshotter requests it.
fn snapshotted(name: &str, source: &str) -> CreateSnapshotRequest {
    let mut request = snapshot(name, source);
    let key = "csi.storage.k8s.io/volumesnapshotcontent/name";
    request.parameters.insert(key.into(), name.into());
    request
}

fn grouped(name: &str, sources: &[&str]) -> CreateVolumeGroupSnapshotRequest {
    let mut request = group(name, sources);
    for key in ["name", "namespace"] {
        let key = format!("csi.storage.k8s.io/volumegroupsnapshot/{key}");
        request.parameters.insert(key, name.into());
    }
    request
}

fn failed(context: &str, what: &str, status: &Status) -> ! {
    panic!("{context}: {what}: {status:?}")
}

fn members(group: &VolumeGroupSnapshot) -> Vec<String> {
    let each = group.snapshots.iter();
    each.map(|one| one.snapshot_id.clone()).collect()
}

impl Fixture {
    async fn new() -> Fixture {
        let a = AgentNode::start("node-a", &["default"], None);
        let b = AgentNode::start("node-b", &["default"], None);
        let (liar, lying) = Liar::before(b.address);
        let routed = TestRouter::with(all_alpha()).await;
        routed
            .set(&[("node-a", a.address), ("node-b", lying.address)])
            .await;
        routed.kubernetes.update(|state| {
            state.known = vec![known(&a), known(&b)];
        });
        let victim = routed.create_on("victim", &a).await;
        let own = routed.create_on("own", &b).await;
        let created = async |name: &str, of: &str| {
            let mut controller = routed.controller();
            let created = controller.create_snapshot(snapshotted(name, of)).await;
            let created = created.unwrap().into_inner().snapshot;
            created.unwrap().snapshot_id
        };
        let (snapshot, own_snapshot) = (created("s", &victim).await, created("own", &own).await);
        let asked = grouped("victims", &[&victim]);
        let group = loop {
            let mut groups = routed.groups();
            match groups.create_volume_group_snapshot(asked.clone()).await {
                Err(status) if status.code() == Code::Aborted => {}
                created => break created,
            }
        };
        let group = group.unwrap().into_inner().group_snapshot.unwrap();
        Fixture {
            a,
            b,
            liar,
            _lying: lying,
            routed,
            victim,
            snapshot,
            group,
            own,
            own_snapshot,
            rounds: 0,
        }
    }

    /// Makes every call that may go to node b's agent. A call may fail; if it succeeds, its answer
    /// is about node b.
    async fn uses_the_liar(&mut self) {
        self.rounds += 1;
        let (name, b) = (format!("n{}", self.rounds), self.b.home());
        let mut controller = self.routed.controller();
        // This call queries the description of all agents.
        let _ = controller
            .list_snapshots(ListSnapshotsRequest::default())
            .await;
        let listed = self.routed.list(0).await;
        if let Ok(listed) = listed {
            let is_once = |id: &String| listed.iter().filter(|one| *one == id).count() == 1;
            assert!(is_once(&self.victim), "{listed:?}");
        }
        let pool = self.b.pool_id().to_string();
        let is_of_b = |id: &str| assert!(id.starts_with(&pool), "{id} is not of node b");
        let created = self.routed.create(at(create(&name), &[&b])).await;
        if let Ok(created) = &created {
            is_of_b(&created.volume_id);
            assert_eq!(home_of(created), b);
            self.delete(&created.volume_id).await;
        }
        let clone = VolumeContentSource {
            r#type: Some(from_snapshot(&self.own_snapshot)),
        };
        let clone = CreateVolumeRequest {
            volume_content_source: Some(clone),
            ..create(&format!("{name}-restored"))
        };
        if let Ok(created) = self.routed.create(clone).await {
            is_of_b(&created.volume_id);
            self.delete(&created.volume_id).await;
        }
        let created = controller.create_snapshot(snapshot(&name, &self.own)).await;
        if let Ok(created) = created {
            let created = created.into_inner().snapshot.unwrap();
            is_of_b(&created.snapshot_id);
            assert_eq!(created.source_volume_id, self.own);
            let delete = DeleteSnapshotRequest {
                snapshot_id: created.snapshot_id,
                ..Default::default()
            };
            let _ = controller.delete_snapshot(delete).await;
        }
        self.asks_about_its_own().await;
        self.groups_with_its_own(&name).await;
    }

    async fn delete(&self, id: &str) {
        let request = DeleteVolumeRequest {
            volume_id: id.to_string(),
            ..Default::default()
        };
        let _ = self.routed.controller().delete_volume(request).await;
    }

    async fn asks_about_its_own(&self) {
        let mut controller = self.routed.controller();
        for request in [
            ListSnapshotsRequest {
                snapshot_id: self.own_snapshot.clone(),
                ..Default::default()
            },
            ListSnapshotsRequest {
                source_volume_id: self.own.clone(),
                ..Default::default()
            },
        ] {
            if let Ok(listed) = controller.list_snapshots(request).await {
                for entry in listed.into_inner().entries {
                    assert_ne!(entry.snapshot.unwrap().snapshot_id, self.snapshot);
                }
            }
        }
        let volume_id = self.own.clone();
        let get = ControllerGetVolumeRequest {
            volume_id: volume_id.clone(),
        };
        if let Ok(got) = controller.controller_get_volume(get).await {
            assert_eq!(got.into_inner().volume.unwrap().volume_id, self.own);
        }
        let get = GetSnapshotRequest {
            snapshot_id: self.own_snapshot.clone(),
            ..Default::default()
        };
        if let Ok(got) = controller.get_snapshot(get).await {
            let got = got.into_inner().snapshot.unwrap();
            assert_eq!(got.snapshot_id, self.own_snapshot);
        }
        let health = ControllerGetVolumeHealthRequest {
            volume_id: volume_id.clone(),
            ..Default::default()
        };
        if let Ok(got) = controller.controller_get_volume_health(health).await {
            let got = got.into_inner().volume_health.unwrap();
            assert_eq!(got.volume_id, self.own);
        }
        let expand = ControllerExpandVolumeRequest {
            volume_id: volume_id.clone(),
            capacity_range: at_least(GIB),
            ..Default::default()
        };
        let _ = controller.controller_expand_volume(expand).await;
        let validate = ValidateVolumeCapabilitiesRequest {
            volume_id: volume_id.clone(),
            volume_capabilities: vec![mount()],
            ..Default::default()
        };
        let _ = controller.validate_volume_capabilities(validate).await;
        let modify = ControllerModifyVolumeRequest {
            volume_id,
            mutable_parameters: map([("wipe", "none")]),
            ..Default::default()
        };
        let _ = controller.controller_modify_volume(modify).await;
        let _ = controller.get_capacity(GetCapacityRequest::default()).await;
        let health = ControllerListVolumeHealthRequest::default();
        let _ = controller.controller_list_volume_health(health).await;
    }

    async fn groups_with_its_own(&self, name: &str) {
        let mut groups = self.routed.groups();
        let both = grouped(name, &[&self.own, &self.victim]);
        let Ok(created) = groups.create_volume_group_snapshot(both).await else {
            return;
        };
        let created = created.into_inner().group_snapshot.unwrap();
        let get = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: created.group_snapshot_id.clone(),
            snapshot_ids: members(&created),
            ..Default::default()
        };
        let _ = groups.get_volume_group_snapshot(get).await;
        let delete = DeleteVolumeGroupSnapshotRequest {
            snapshot_ids: members(&created),
            group_snapshot_id: created.group_snapshot_id,
            ..Default::default()
        };
        let _ = groups.delete_volume_group_snapshot(delete).await;
    }

    /// Verifies that the objects of node a exist and are fully usable, whatever node b answers.
    async fn victim_is_well(&self, context: &str) {
        let mut controller = self.routed.controller();
        let validate = ValidateVolumeCapabilitiesRequest {
            volume_id: self.victim.clone(),
            volume_capabilities: vec![mount()],
            ..Default::default()
        };
        let valid = controller.validate_volume_capabilities(validate).await;
        let valid = valid.unwrap_or_else(|status| failed(context, "the volume", &status));
        assert!(valid.into_inner().confirmed.is_some(), "{context}");
        let list = ListSnapshotsRequest {
            snapshot_id: self.snapshot.clone(),
            ..Default::default()
        };
        let listed = controller.list_snapshots(list).await;
        let listed = listed.unwrap_or_else(|status| failed(context, "the snapshot", &status));
        let listed = listed.into_inner().entries;
        assert_eq!(listed.len(), 1, "{context}");
        assert_eq!(
            listed[0].snapshot.as_ref().unwrap().snapshot_id,
            self.snapshot
        );
        let get = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: self.group.group_snapshot_id.clone(),
            snapshot_ids: members(&self.group),
            ..Default::default()
        };
        let group = self.routed.groups().get_volume_group_snapshot(get).await;
        let group = group.unwrap_or_else(|status| failed(context, "the group", &status));
        assert_eq!(
            group.into_inner().group_snapshot.as_ref(),
            Some(&self.group)
        );
        // New objects can be created and deleted.
        let name = format!("of-a-{}", self.rounds);
        let created = controller
            .create_snapshot(snapshotted(&name, &self.victim))
            .await;
        let created = created.unwrap_or_else(|status| failed(context, "a new snapshot", &status));
        let snapshot_id = created.into_inner().snapshot.unwrap().snapshot_id;
        let delete = DeleteSnapshotRequest {
            snapshot_id,
            ..Default::default()
        };
        controller.delete_snapshot(delete).await.unwrap();
        let claim = claimed(at(create(&name), &[&self.a.home()]), "shop/new");
        self.routed.kubernetes.update(|state| {
            state.selected.insert("shop/new".into(), "node-a".into());
        });
        let created = self.routed.create(claim).await;
        let created = created.unwrap_or_else(|status| failed(context, "a new volume", &status));
        assert_eq!(home_of(&created), self.a.home(), "{context}");
        let delete = DeleteVolumeRequest {
            volume_id: created.volume_id,
            ..Default::default()
        };
        controller.delete_volume(delete).await.unwrap();
        let one = grouped(&name, &[&self.victim]);
        // An agent may still be finishing the cut, so callers repeat.
        let created = loop {
            let mut groups = self.routed.groups();
            match groups.create_volume_group_snapshot(one.clone()).await {
                Err(status) if status.code() == Code::Aborted => {}
                created => break created,
            }
        };
        let created = created.unwrap_or_else(|status| failed(context, "a new group", &status));
        let created = created.into_inner().group_snapshot.unwrap();
        let delete = DeleteVolumeGroupSnapshotRequest {
            snapshot_ids: members(&created),
            group_snapshot_id: created.group_snapshot_id,
            ..Default::default()
        };
        let deleted = loop {
            let mut groups = self.routed.groups();
            match groups.delete_volume_group_snapshot(delete.clone()).await {
                Err(status) if status.code() == Code::Aborted => {}
                deleted => break deleted,
            }
        };
        deleted.unwrap_or_else(|status| failed(context, "the end of a group", &status));
        let has = &self.a.driver.pool_status()[0];
        // Parts of groups on both nodes may be left on node a until both can be reached.
        assert_eq!(has.volumes, 1, "{context}");
        assert!(has.snapshots >= 2, "{context}");
        let held = self.routed.kubernetes.0.lock().unwrap().held.clone();
        assert!(
            held.is_empty(),
            "{context}: no volume is in use, but {held:?} were held"
        );
    }

    async fn round(&mut self, lie: Option<Lie>) {
        let context = format!("{lie:?}");
        let context: String = context.chars().take(300).collect();
        self.liar.set_lie(lie);
        let used = tokio::time::timeout(LONG, self.uses_the_liar()).await;
        assert!(used.is_ok(), "{context}: a call hangs");
        let well = tokio::time::timeout(LONG, self.victim_is_well(&context)).await;
        assert!(well.is_ok(), "{context}: a call of the victim hangs");
    }

    /// Texts about node a.
    fn texts(&self) -> Vec<String> {
        vec![
            self.victim.clone(),
            self.snapshot.clone(),
            self.group.group_snapshot_id.clone(),
            self.a.pool_id().to_string(),
            self.a.home(),
            "node-a".into(),
            "x".repeat(70_000),
        ]
    }

    /// Each lie about each field of the answers of these methods.
    fn lies(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Lie> {
        let mut lies = Vec::new();
        let all = self.liar.fields();
        for (method, kinds) in all.into_iter().filter(|(method, _)| is_meant(method)) {
            for (field, kind) in kinds.into_iter().enumerate() {
                let mut kinds = vec![LieKind::Dropped, LieKind::Twice];
                match kind {
                    Kind::Text => kinds.extend(self.texts().into_iter().map(LieKind::Text)),
                    Kind::Number => kinds.extend([0, 1, u64::MAX].map(LieKind::Number)),
                    Kind::Other => {}
                }
                let lie = |what| Lie {
                    method: method.clone(),
                    field,
                    what,
                };
                lies.extend(kinds.into_iter().map(lie));
            }
        }
        lies
    }

    /// Applies each of these lies, or the part of them that `SLACKWATER_SWEEP` requests.
    async fn lies_about(&mut self, is_meant: impl Fn(&str) -> bool) {
        self.round(None).await;
        let mut reported = 0;
        let sweep = Sweep::requested();
        for lie in sweep.part(self.lies(is_meant).into_iter()) {
            self.round(Some(lie)).await;
            reported += self.liar.times_applied();
        }
        // A part may have few lies.
        assert!(
            sweep.of > 1 || reported > 20,
            "only {reported} lies were applied"
        );
        self.round(None).await;
        assert!(
            self.routed.list(0).await.is_ok(),
            "the truth is believed again"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_of_an_answer_about_volumes_harms_another_node() {
    let mut fixture = Fixture::new().await;
    let methods = ["CreateVolume", "ListVolumes", "Find", "GetCapacity"];
    fixture.lies_about(|method| methods.contains(&method)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_of_an_answer_about_snapshots_harms_another_node() {
    let mut fixture = Fixture::new().await;
    let methods = ["CreateSnapshot", "ListSnapshots", "GetSnapshot"];
    fixture.lies_about(|method| methods.contains(&method)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_of_an_agents_description_harms_another_node() {
    let mut fixture = Fixture::new().await;
    fixture.lies_about(|method| method == "Describe").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_of_an_answer_about_groups_harms_another_node() {
    let mut fixture = Fixture::new().await;
    let methods = ["Cut", "GetGroup", "SettleGroup", "DeleteGroup"];
    fixture.lies_about(|method| methods.contains(&method)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_of_any_other_answer_harms_another_node() {
    let mut fixture = Fixture::new().await;
    let others = [
        "ControllerGetVolume",
        "ControllerGetVolumeHealth",
        "ControllerListVolumeHealth",
        "ControllerExpandVolume",
        "ControllerModifyVolume",
        "ValidateVolumeCapabilities",
    ];
    fixture.lies_about(|method| others.contains(&method)).await;
}

/// A node that has one member of a group can't have others left out or added, whichever agent
/// answers last.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_a_member_of_a_group_does_not_redefine_the_group() {
    let fixture = Fixture::new().await;
    for sources in [
        [fixture.victim.as_str(), &fixture.own],
        [&fixture.own, &fixture.victim],
    ] {
        let asked = grouped(&format!("of-both-{}", sources[0]), &sources);
        let create = async || {
            let mut groups = fixture.routed.groups();
            loop {
                let created = groups.create_volume_group_snapshot(asked.clone()).await;
                match created {
                    Err(status) if status.code() == Code::Aborted => {}
                    created => break created.map(|answer| answer.into_inner().group_snapshot),
                }
            }
        };
        let group = create().await.unwrap().unwrap();
        let get = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: group.group_snapshot_id.clone(),
            ..Default::default()
        };
        let id = group.group_snapshot_id.parse().unwrap();
        let reported = fixture.b.driver.snapshots.group_here(id, &[]).unwrap();
        let theirs = reported.members.iter().map(|one| GroupMember {
            snapshot_id: one.snapshot.id.to_string(),
            source_volume_id: one.snapshot.source_volume_id.to_string(),
            size_bytes: GIB,
            cut_at: one.snapshot.cut_at,
            level: one.snapshot.level.to_string(),
            attempt: one.attempt.to_string(),
            state: group_member::State::Ready.into(),
            home: fixture.b.home(),
            ..GroupMember::default()
        });
        let real = GetGroupResponse {
            members: theirs.collect(),
            all_member_ids: members(&group),
            all_source_volume_ids: sources.map(str::to_string).to_vec(),
            ..GetGroupResponse::default()
        };
        let position = sources.iter().position(|one| *one == fixture.own).unwrap();
        let alone = GetGroupResponse {
            all_member_ids: vec![real.all_member_ids[position].clone()],
            all_source_volume_ids: vec![fixture.own.clone()],
            ..real.clone()
        };
        let mut reversed = real.clone();
        reversed.all_member_ids.reverse();
        reversed.all_source_volume_ids.reverse();
        for (forged, is_true) in [(real, true), (alone, false), (reversed, false)] {
            fixture.liar.set_lie(Some(Lie {
                method: "GetGroup".into(),
                field: 0,
                what: LieKind::Forged(forged.encode_to_vec()),
            }));
            let mut groups = fixture.routed.groups();
            let got = groups.get_volume_group_snapshot(get.clone());
            let got = got.await.map(|answer| answer.into_inner().group_snapshot);
            for answer in [got, create().await] {
                match answer {
                    Ok(answer) => assert!(is_true && answer.as_ref() == Some(&group), "{answer:?}"),
                    Err(status) => {
                        assert!(!is_true, "{status:?}");
                        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
                        assert!(status.message().contains("report different members"));
                    }
                }
            }
        }
        fixture.liar.set_lie(None);
        assert_eq!(create().await.unwrap(), Some(group));
    }
}

/// Whole answers that a compromised agent may invent.
#[tokio::test(flavor = "multi_thread")]
async fn no_forged_answer_harms_another_node() {
    let mut fixture = Fixture::new().await;
    let (a, b) = (fixture.a.pool_id().to_string(), fixture.b.pool_id());
    let describe = |change: &dyn Fn(&mut DescribeResponse)| {
        let pool = Pool {
            name: "default".into(),
            id: b.to_string(),
            total_bytes: 1 << 40,
            available_bytes: 1 << 40,
            promisable_bytes: 1 << 40,
            ..Pool::default()
        };
        let mut reported = DescribeResponse {
            node_name: "node-b".into(),
            driver_name: DRIVER.into(),
            home: fixture.b.home(),
            pools: vec![pool],
            ..DescribeResponse::default()
        };
        change(&mut reported);
        reported.encode_to_vec()
    };
    let others = |forgotten| {
        describe(&|reported| {
            reported.pools.push(Pool {
                name: "theirs".into(),
                id: a.clone(),
                forgotten,
                ..Pool::default()
            });
        })
    };
    let busy = describe(&|reported| {
        reported.busy_groups = vec![fixture.group.group_snapshot_id.clone()];
        reported.unsettled_groups = reported.busy_groups.clone();
    });
    let many = describe(&|reported| {
        let pools = (0..1000).map(|n| Pool {
            name: format!("p{n}"),
            id: PoolId(Uuid::from_u128(n)).to_string(),
            ..Pool::default()
        });
        reported.pools.extend(pools);
    });
    let home = describe(&|reported| reported.home = fixture.a.home());
    let member = GroupMember {
        snapshot_id: members(&fixture.group).remove(0),
        source_volume_id: fixture.own.clone(),
        state: group_member::State::Ready.into(),
        level: "crash".into(),
        ..GroupMember::default()
    };
    let group = |change: &dyn Fn(&mut GetGroupResponse)| {
        let mut reported = GetGroupResponse::default();
        change(&mut reported);
        reported.encode_to_vec()
    };
    let cut = |begun: cut_response::Begun| {
        let answer = Some(cut_response::Answer::Begun(begun));
        CutResponse { answer }.encode_to_vec()
    };
    let target = cut_response::Target {
        volume_id: fixture.victim.clone(),
        claim: "shop/db".into(),
        unsuspendable: String::new(),
        raw: false,
    };
    let lies: Vec<(&str, Vec<u8>)> = vec![
        ("Describe", others(false)),
        ("Describe", others(true)),
        ("Describe", busy),
        ("Describe", many),
        ("Describe", home),
        ("Find", {
            let id = fixture.victim.clone();
            FindResponse { id }.encode_to_vec()
        }),
        ("GetGroup", group(&|reported| reported.busy = true)),
        (
            "GetGroup",
            group(&|reported| reported.unseen = "its disk".into()),
        ),
        (
            "GetGroup",
            group(&|reported| {
                reported.members = vec![member.clone()];
                reported.all_member_ids = members(&fixture.group);
                reported.all_source_volume_ids = vec![fixture.own.clone()];
            }),
        ),
        (
            "Cut",
            cut(cut_response::Begun {
                targets: vec![target],
                plain: false,
                ahead: false,
            }),
        ),
        (
            "CreateVolume",
            CreateVolumeResponse::default().encode_to_vec(),
        ),
        (
            "CreateSnapshot",
            CreateSnapshotResponse::default().encode_to_vec(),
        ),
        ("ListVolumes", {
            let next_token = fixture.victim.clone();
            let page = ListVolumesResponse {
                next_token,
                ..Default::default()
            };
            page.encode_to_vec()
        }),
    ];
    for (method, forged) in lies {
        let lie = Lie {
            method: method.into(),
            field: 0,
            what: LieKind::Forged(forged),
        };
        fixture.round(Some(lie)).await;
        assert!(fixture.liar.times_applied() > 0, "{method}");
    }
    fixture.round(None).await;
    let mut controller = fixture.routed.controller();
    let listed = controller.list_snapshots(ListSnapshotsRequest::default());
    assert!(listed.await.is_ok());
}

/// A node that answers with another node's objects gets neither the other's data nor the other's
/// objects deleted, and an event names the node.
#[tokio::test(flavor = "multi_thread")]
async fn ids_of_another_node_are_refused_counted_and_reported() {
    let fixture = Fixture::new().await;
    let forged = |id: &str, home: &str| {
        let topology = Topology {
            segments: [(KEY.to_string(), home.to_string())].into(),
        };
        let volume = Volume {
            volume_id: id.into(),
            capacity_bytes: GIB,
            accessible_topology: vec![topology],
            ..Volume::default()
        };
        let created = CreateVolumeResponse {
            volume: Some(volume),
        };
        LieKind::Forged(created.encode_to_vec())
    };
    let lies = |method: &str, what: LieKind| {
        fixture.liar.set_lie(Some(Lie {
            method: method.into(),
            field: 0,
            what,
        }));
    };
    // Its volume would be deleted together with another user's claim.
    lies("CreateVolume", forged(&fixture.victim, &fixture.a.home()));
    let created = fixture
        .routed
        .create(at(create("m"), &[&fixture.b.home()]))
        .await;
    refused(created, Code::Unavailable, &["node-b", "rejected"]);
    // Its snapshot would be restored into another user's claim.
    let stolen = Snapshot {
        snapshot_id: fixture.snapshot.clone(),
        source_volume_id: fixture.own.clone(),
        ready_to_use: true,
        ..Snapshot::default()
    };
    let stolen = CreateSnapshotResponse {
        snapshot: Some(stolen),
    };
    lies("CreateSnapshot", LieKind::Forged(stolen.encode_to_vec()));
    let mut controller = fixture.routed.controller();
    let created = controller
        .create_snapshot(snapshotted("m", &fixture.own))
        .await;
    refused(created, Code::Unavailable, &["node-b", "rejected"]);
    fixture.liar.set_lie(None);
    let reported = fixture.routed.kubernetes.0.lock().unwrap().reported.clone();
    let about = (ObjectRef::Node("node-b".into()), "AnswerRefused");
    assert_eq!(
        reported.iter().filter(|one| **one == about).count(),
        2,
        "{reported:?}"
    );
    let text = fixture.routed.metrics.render().unwrap();
    let counted = "slackwater_agent_answers_refused_total{agent=\"node-b\"} 2";
    assert!(text.contains(counted), "{text}");
    assert_eq!(fixture.a.driver.pool_status()[0].volumes, 1);
}

/// A pool of a node that cannot be reached is assigned to another node only after an administrator
/// confirms it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_a_silent_node_is_taken_over_by_a_mark_or_the_end_of_its_node() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let claims = crate::router::fake::Fake::new("node-b", "b", &[a.pool_id()]);
    let served = claims.serve();
    let routed = TestRouter::new(&[("node-a", a.address), ("node-b", served.address)]).await;
    routed
        .kubernetes
        .update(|state| state.known = vec![known(&a)]);
    let id = format!("{}.{}", a.pool_id(), Uuid::from_u128(8));
    let delete = || DeleteVolumeRequest {
        volume_id: id.clone(),
        ..Default::default()
    };
    let asked = || claims.timeouts.lock().unwrap().len();
    let mut controller = routed.controller();
    // While both answer, the node that had the pool keeps it.
    let before = asked();
    controller.delete_volume(delete()).await.unwrap();
    assert_eq!(asked(), before);
    let page = routed.metrics.render().unwrap();
    let claimed = "slackwater_agent_pools_claimed{agent=\"node-b\"} 1";
    assert!(page.contains(claimed), "{page}");
    a.kill();
    routed.until("node-a", false).await;
    let silent = controller.delete_volume(delete()).await;
    refused(silent, Code::Unavailable, &["node-a"]);
    assert_eq!(asked(), before);
    // A router that has just started reaches the same result.
    let late = TestRouter::new(&[("node-a", a.address), ("node-b", served.address)]).await;
    late.kubernetes
        .update(|state| state.known = vec![known(&a)]);
    let silent = late.controller().delete_volume(delete()).await;
    refused(silent, Code::Unavailable, &["node-a"]);
    assert_eq!(asked(), before);
    // An administrator assigns the pool to node-b.
    late.kubernetes
        .update(|state| state.known[0].node = "node-b".into());
    late.controller().delete_volume(delete()).await.unwrap();
    assert_eq!(asked(), before + 1);
    // Or its Node object is deleted.
    routed.kubernetes.update(|state| {
        state.gone.insert("node-a".into());
    });
    controller.delete_volume(delete()).await.unwrap();
    assert_eq!(asked(), before + 2);
}
