//! Random calls: a router with three agents behaves as one driver with all their pools, except for
//! unreachable objects.

use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;
use slackwater::csi::*;
use tonic::{Code, Status};

use crate::router::cluster::*;
use crate::service::harness::*;

const NODES: usize = 3;
const NAMES: usize = 4;

#[derive(Clone, Debug)]
enum Act {
    /// Creates a volume: its name, and its node (`None` for any).
    Create(usize, Option<usize>),
    Delete(usize),
    Grow(usize, i64),
    /// Creates a snapshot: its name, and its volume.
    Snapshot(usize, usize),
    DeleteSnapshot(usize),
    /// Restores a volume: its name, and its snapshot.
    Restore(usize, usize),
    List(i32),
    ListSnapshots,
    Kill(usize),
    Revive(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let name = 0..NAMES;
    let one = prop_oneof![
        4 => (name.clone(), proptest::option::of(0..NODES)).prop_map(|(n, on)| Act::Create(n, on)),
        2 => name.clone().prop_map(Act::Delete),
        2 => (name.clone(), 1..4i64).prop_map(|(n, more)| Act::Grow(n, more)),
        3 => (name.clone(), name.clone()).prop_map(|(n, of)| Act::Snapshot(n, of)),
        2 => name.clone().prop_map(Act::DeleteSnapshot),
        2 => (name.clone(), name).prop_map(|(n, of)| Act::Restore(n, of)),
        2 => (0..4i32).prop_map(Act::List),
        1 => Just(Act::ListSnapshots),
        1 => (0..NODES).prop_map(Act::Kill),
        2 => (0..NODES).prop_map(Act::Revive),
    ];
    proptest::collection::vec(one, 1..40)
}

/// A volume, or a snapshot with its source, in its expected state.
#[derive(Clone, Debug, PartialEq)]
struct ObjectView {
    id: String,
    node: usize,
    size: i64,
    source: String,
}

struct ClusterModel {
    nodes: Vec<AgentNode>,
    away: [bool; NODES],
    routed: TestRouter,
    volumes: BTreeMap<usize, ObjectView>,
    snapshots: BTreeMap<usize, ObjectView>,
    /// IDs of deleted volumes: calls about them still need their pool.
    old_volumes: BTreeMap<usize, ObjectView>,
}

impl ClusterModel {
    async fn new() -> ClusterModel {
        let nodes: Vec<_> = (0..NODES)
            .map(|n| AgentNode::start(&format!("node-{n}"), &["default"], None))
            .collect();
        let routed = TestRouter::of(&nodes.iter().collect::<Vec<_>>()).await;
        ClusterModel {
            nodes,
            away: [false; NODES],
            routed,
            volumes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            old_volumes: BTreeMap::new(),
        }
    }

    fn all_there(&self) -> bool {
        !self.away.iter().any(|away| *away)
    }

    fn node_of(&self, volume: &Volume) -> usize {
        let found = self
            .nodes
            .iter()
            .position(|node| node.home() == home_of(volume));
        found.unwrap()
    }

    /// Whether an answer is as expected, given the nodes that the call needs.
    #[track_caller]
    fn judge<T: std::fmt::Debug>(
        &self,
        needed: &[usize],
        answer: Result<T, Status>,
        expected: Result<(), Code>,
    ) -> Option<T> {
        if needed.iter().any(|node| self.away[*node]) {
            assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
            return None;
        }
        match (answer, expected) {
            (Ok(answer), Ok(())) => Some(answer),
            (Err(status), Err(code)) if status.code() == code => None,
            (answer, expected) => panic!("{answer:?} instead of {expected:?}"),
        }
    }

    async fn act(&mut self, act: &Act) {
        let all_nodes: Vec<_> = (0..NODES).collect();
        let mut controller = self.routed.controller();
        match *act {
            Act::Create(name, on) => self.create(name, on).await,
            Act::Delete(name) => {
                let Some(object) = self
                    .volumes
                    .get(&name)
                    .or(self.old_volumes.get(&name))
                    .cloned()
                else {
                    return;
                };
                let request = DeleteVolumeRequest {
                    volume_id: object.id.clone(),
                    ..Default::default()
                };
                let answer = controller.delete_volume(request).await;
                if self.judge(&[object.node], answer, Ok(())).is_some() {
                    self.volumes.remove(&name);
                    self.old_volumes.insert(name, object);
                }
            }
            Act::Grow(name, more) => {
                let (object, there) = match self.volumes.get(&name) {
                    Some(object) => (object.clone(), true),
                    None => match self.old_volumes.get(&name) {
                        Some(object) => (object.clone(), false),
                        None => return,
                    },
                };
                let size = object.size + more * GIB;
                let request = ControllerExpandVolumeRequest {
                    volume_id: object.id.clone(),
                    capacity_range: at_least(size),
                    ..Default::default()
                };
                let answer = controller.controller_expand_volume(request).await;
                let expected = if there { Ok(()) } else { Err(Code::NotFound) };
                if self.judge(&[object.node], answer, expected).is_some() {
                    self.volumes.get_mut(&name).unwrap().size = size;
                }
            }
            Act::Snapshot(name, of) => self.snapshot(name, of).await,
            Act::DeleteSnapshot(name) => {
                let Some(object) = self.snapshots.get(&name).cloned() else {
                    return;
                };
                let request = DeleteSnapshotRequest {
                    snapshot_id: object.id.clone(),
                    ..Default::default()
                };
                let answer = controller.delete_snapshot(request).await;
                if self.judge(&[object.node], answer, Ok(())).is_some() {
                    self.snapshots.remove(&name);
                }
            }
            Act::Restore(name, of) => self.restore(name, of).await,
            Act::List(most) => {
                let answer = self.routed.list(most).await;
                if let Some(listed) = self.judge(&all_nodes, answer, Ok(())) {
                    let mut ids: Vec<_> = self.volumes.values().map(|v| v.id.clone()).collect();
                    ids.sort();
                    assert_eq!(listed, ids);
                }
            }
            Act::ListSnapshots => {
                let answer = controller
                    .list_snapshots(ListSnapshotsRequest::default())
                    .await;
                if let Some(listed) = self.judge(&all_nodes, answer, Ok(())) {
                    let listed: Vec<_> = listed
                        .into_inner()
                        .entries
                        .into_iter()
                        .map(|entry| entry.snapshot.unwrap())
                        .map(|one| (one.snapshot_id, one.source_volume_id))
                        .collect();
                    let things = self.snapshots.values();
                    let mut ids: Vec<_> =
                        things.map(|s| (s.id.clone(), s.source.clone())).collect();
                    ids.sort();
                    assert_eq!(listed, ids);
                }
            }
            Act::Kill(node) => {
                self.nodes[node].kill();
                self.away[node] = true;
            }
            Act::Revive(node) => {
                if self.away[node] {
                    self.nodes[node].revive();
                    self.away[node] = false;
                    let name = self.nodes[node].name.clone();
                    let now = Instant::now();
                    self.routed.until_answered_since(&name, now).await;
                }
            }
        }
    }

    async fn create(&mut self, name: usize, on: Option<usize>) {
        let request = create(&format!("v{name}"));
        let request = match on {
            Some(node) => at(request, &[&self.nodes[node].home()]),
            None => request,
        };
        let there = self.volumes.get(&name).cloned();
        // The router does not look for it on nodes other than the requested ones. A model of that
        // would need the hash.
        if let (Some(object), Some(node)) = (&there, on)
            && object.node != node
        {
            return;
        }
        let answer = self.routed.create(request).await;
        let needed: Vec<usize> = match (on, &there) {
            (Some(node), _) => vec![node],
            // The node that has it answers, even if other nodes are away.
            (None, Some(object)) => vec![object.node],
            (None, None) if self.all_there() => Vec::new(),
            (None, None) => (0..NODES).collect(),
        };
        let expected = match &there {
            Some(object) if object.size < GIB => Err(Code::AlreadyExists),
            Some(_) | None => Ok(()),
        };
        if let Some(created) = self.judge(&needed, answer, expected) {
            let object = ObjectView {
                node: self.node_of(&created),
                id: created.volume_id,
                size: created.capacity_bytes,
                source: String::new(),
            };
            match there {
                Some(there) => assert_eq!((object.id, object.size), (there.id, there.size)),
                None => {
                    assert!(on.is_none_or(|node| node == object.node));
                    self.volumes.insert(name, object);
                }
            }
        }
    }

    async fn snapshot(&mut self, name: usize, of: usize) {
        let Some(source) = self.volumes.get(&of).cloned() else {
            return;
        };
        let there = self.snapshots.get(&name).cloned();
        let request = snapshot(&format!("s{name}"), &source.id);
        let answer = self.routed.controller().create_snapshot(request).await;
        if let Some(there) = &there
            && there.node != source.node
            && self.away[source.node]
            && !self.away[there.node]
        {
            // The name is in use, whatever the source's node answers. The router may have noticed
            // before that this node is away, and then query no other node.
            let code = answer.unwrap_err().code();
            assert!(
                [Code::AlreadyExists, Code::Unavailable].contains(&code),
                "{code:?}"
            );
            return;
        }
        let (needed, expected) = match &there {
            // As far as the router knows, the other nodes might have one of this name as well.
            Some(there) if there.node == source.node && there.source == source.id => {
                ((0..NODES).collect(), Ok(()))
            }
            Some(there) if there.node == source.node => {
                ((0..NODES).collect(), Err(Code::AlreadyExists))
            }
            Some(there) => (vec![source.node, there.node], Err(Code::AlreadyExists)),
            None => ((0..NODES).collect::<Vec<_>>(), Ok(())),
        };
        if let Some(created) = self.judge(&needed, answer, expected) {
            let created = created.into_inner().snapshot.unwrap();
            let object = ObjectView {
                id: created.snapshot_id,
                node: source.node,
                size: created.size_bytes,
                source: source.id,
            };
            match there {
                Some(there) => assert_eq!(object.id, there.id),
                None => {
                    self.snapshots.insert(name, object);
                }
            }
        }
    }

    /// With separate names, because this test is not about names.
    async fn restore(&mut self, name: usize, of: usize) {
        let Some(source) = self.snapshots.get(&of).cloned() else {
            return;
        };
        let name = NAMES + name * NAMES + of;
        if self.volumes.contains_key(&name) {
            return;
        }
        let request = CreateVolumeRequest {
            volume_content_source: Some(VolumeContentSource {
                r#type: Some(from_snapshot(&source.id)),
            }),
            capacity_range: at_least(source.size),
            ..create(&format!("r{name}"))
        };
        let answer = self.routed.create(request).await;
        if let Some(created) = self.judge(&[source.node], answer, Ok(())) {
            assert_eq!(self.node_of(&created), source.node);
            let object = ObjectView {
                id: created.volume_id.clone(),
                node: source.node,
                size: created.capacity_bytes,
                source: String::new(),
            };
            self.volumes.insert(name, object);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_router_behaves_as_one_driver_except_for_unreachable_nodes(acts in acts()) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut cluster_model = ClusterModel::new().await;
            for act in &acts {
                cluster_model.act(act).await;
            }
            for node in &cluster_model.nodes {
                assert_eq!(node.machine.violations(), Vec::<String>::new());
                // A router that has its answer leaves the agents that it also asked to finish.
                eventually("each lock is released", async || node.driver.pools.locks_held() == 0).await;
            }
        });
    }
}
