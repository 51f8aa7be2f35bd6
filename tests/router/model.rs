//! Random calls: a router with three agents is one driver with all their pools, except for what
//! can't be reached.

use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;
use slackwater::csi::*;
use tonic::{Code, Status};

use crate::ground::*;
use crate::harness::*;

const NODES: usize = 3;
const NAMES: usize = 4;

#[derive(Clone, Debug)]
enum Act {
    /// Name, and on which node; none is anywhere.
    Create(usize, Option<usize>),
    Delete(usize),
    Grow(usize, i64),
    /// Name, and of which volume.
    Snapshot(usize, usize),
    DeleteSnapshot(usize),
    /// Name, and of which snapshot.
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

/// A volume, or a snapshot with its source, as they should be.
#[derive(Clone, Debug, PartialEq)]
struct Thing {
    id: String,
    node: usize,
    size: i64,
    source: String,
}

struct World {
    nodes: Vec<Peer>,
    away: [bool; NODES],
    routed: Routed,
    volumes: BTreeMap<usize, Thing>,
    snapshots: BTreeMap<usize, Thing>,
    /// Ids that are gone: calls about them still need their pool.
    old_volumes: BTreeMap<usize, Thing>,
}

impl World {
    async fn new() -> World {
        let nodes: Vec<_> = (0..NODES)
            .map(|n| Peer::start(&format!("node-{n}"), &["default"], None))
            .collect();
        let routed = Routed::of(&nodes.iter().collect::<Vec<_>>()).await;
        World {
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

    /// Whether an answer is what it must be, given who is needed for it.
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
        let everybody: Vec<_> = (0..NODES).collect();
        let mut controller = self.routed.controller();
        match *act {
            Act::Create(name, on) => self.create(name, on).await,
            Act::Delete(name) => {
                let Some(thing) = self
                    .volumes
                    .get(&name)
                    .or(self.old_volumes.get(&name))
                    .cloned()
                else {
                    return;
                };
                let request = DeleteVolumeRequest {
                    volume_id: thing.id.clone(),
                    ..Default::default()
                };
                let answer = controller.delete_volume(request).await;
                if self.judge(&[thing.node], answer, Ok(())).is_some() {
                    self.volumes.remove(&name);
                    self.old_volumes.insert(name, thing);
                }
            }
            Act::Grow(name, more) => {
                let (thing, there) = match self.volumes.get(&name) {
                    Some(thing) => (thing.clone(), true),
                    None => match self.old_volumes.get(&name) {
                        Some(thing) => (thing.clone(), false),
                        None => return,
                    },
                };
                let size = thing.size + more * GIB;
                let request = ControllerExpandVolumeRequest {
                    volume_id: thing.id.clone(),
                    capacity_range: at_least(size),
                    ..Default::default()
                };
                let answer = controller.controller_expand_volume(request).await;
                let expected = if there { Ok(()) } else { Err(Code::NotFound) };
                if self.judge(&[thing.node], answer, expected).is_some() {
                    self.volumes.get_mut(&name).unwrap().size = size;
                }
            }
            Act::Snapshot(name, of) => self.snapshot(name, of).await,
            Act::DeleteSnapshot(name) => {
                let Some(thing) = self.snapshots.get(&name).cloned() else {
                    return;
                };
                let request = DeleteSnapshotRequest {
                    snapshot_id: thing.id.clone(),
                    ..Default::default()
                };
                let answer = controller.delete_snapshot(request).await;
                if self.judge(&[thing.node], answer, Ok(())).is_some() {
                    self.snapshots.remove(&name);
                }
            }
            Act::Restore(name, of) => self.restore(name, of).await,
            Act::List(most) => {
                let answer = self.routed.list(most).await;
                if let Some(listed) = self.judge(&everybody, answer, Ok(())) {
                    let mut ids: Vec<_> = self.volumes.values().map(|v| v.id.clone()).collect();
                    ids.sort();
                    assert_eq!(listed, ids);
                }
            }
            Act::ListSnapshots => {
                let answer = controller
                    .list_snapshots(ListSnapshotsRequest::default())
                    .await;
                if let Some(listed) = self.judge(&everybody, answer, Ok(())) {
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
        // Elsewhere than asked it isn't looked for; a model of that would know the hash.
        if let (Some(thing), Some(node)) = (&there, on)
            && thing.node != node
        {
            return;
        }
        let answer = self.routed.create(request).await;
        let needed: Vec<usize> = match (on, &there) {
            (Some(node), _) => vec![node],
            // Whoever has it says so, whoever else is away.
            (None, Some(thing)) => vec![thing.node],
            (None, None) if self.all_there() => Vec::new(),
            (None, None) => (0..NODES).collect(),
        };
        let expected = match &there {
            Some(thing) if thing.size < GIB => Err(Code::AlreadyExists),
            Some(_) | None => Ok(()),
        };
        if let Some(made) = self.judge(&needed, answer, expected) {
            let thing = Thing {
                node: self.node_of(&made),
                id: made.volume_id,
                size: made.capacity_bytes,
                source: String::new(),
            };
            match there {
                Some(there) => assert_eq!((thing.id, thing.size), (there.id, there.size)),
                None => {
                    assert!(on.is_none_or(|node| node == thing.node));
                    self.volumes.insert(name, thing);
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
            // The name is taken whatever the source's node says. The router may have noticed before
            // that this node is away, and then ask no other node.
            let code = answer.unwrap_err().code();
            assert!(
                [Code::AlreadyExists, Code::Unavailable].contains(&code),
                "{code:?}"
            );
            return;
        }
        let (needed, expected) = match &there {
            // The others could have one of this name as well, as far as anybody knows.
            Some(there) if there.node == source.node && there.source == source.id => {
                ((0..NODES).collect(), Ok(()))
            }
            Some(there) if there.node == source.node => {
                ((0..NODES).collect(), Err(Code::AlreadyExists))
            }
            Some(there) => (vec![source.node, there.node], Err(Code::AlreadyExists)),
            None => ((0..NODES).collect::<Vec<_>>(), Ok(())),
        };
        if let Some(made) = self.judge(&needed, answer, expected) {
            let made = made.into_inner().snapshot.unwrap();
            let thing = Thing {
                id: made.snapshot_id,
                node: source.node,
                size: made.size_bytes,
                source: source.id,
            };
            match there {
                Some(there) => assert_eq!(thing.id, there.id),
                None => {
                    self.snapshots.insert(name, thing);
                }
            }
        }
    }

    /// Under names of their own, so that names aren't what this is about.
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
        if let Some(made) = self.judge(&[source.node], answer, Ok(())) {
            assert_eq!(self.node_of(&made), source.node);
            let thing = Thing {
                id: made.volume_id.clone(),
                node: source.node,
                size: made.capacity_bytes,
                source: String::new(),
            };
            self.volumes.insert(name, thing);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_router_is_one_driver_except_for_what_is_away(acts in acts()) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut world = World::new().await;
            for act in &acts {
                world.act(act).await;
            }
            for node in &world.nodes {
                assert_eq!(node.machine.violations(), Vec::<String>::new());
                assert_eq!(node.driver.locks_held(), 0);
            }
        });
    }
}
