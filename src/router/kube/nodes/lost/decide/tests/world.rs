//! A model of a cluster with a StatefulSet that replicates its data, and routers that are interrupted,
//! late, or not the leader any more.

use proptest::prelude::*;

use super::*;

const REPLICAS: usize = 5;
/// Two replicas are on each of the first ones. The last one is spare, and does not end.
const NODES: usize = 4;

/// A volume.
#[derive(Clone, Debug)]
struct Stored {
    live: Manifest,
    node: usize,
    /// It has all data of the application.
    is_whole: bool,
}

/// A pod.
#[derive(Clone, Debug)]
struct Replica {
    pod: Pod,
    has_node: bool,
    /// It has been Ready for long enough.
    is_ready: bool,
}

/// What happens.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// The leading router observes, and does this number of changes of its plan.
    Step(usize),
    /// A router observes, and does nothing yet.
    Observe,
    /// It executes its plan late.
    Late,
    NodeEnds(usize),
    NodeReturns(usize),
    /// Kubernetes does its work.
    Kubernetes,
    /// The application has rebuilt its replicas, and they have been Ready for long enough.
    Rebuilt,
    OnNodeLost(bool),
}

#[derive(Clone, Debug)]
struct World {
    version: u64,
    claims: BTreeMap<usize, PersistentVolumeClaim>,
    volumes: BTreeMap<String, Stored>,
    pods: BTreeMap<usize, Replica>,
    gone: BTreeSet<usize>,
    is_recreated: bool,
    late: Option<Plan>,
    /// The changes are of a plan that was made earlier.
    is_late: bool,
}

fn node(number: usize) -> String {
    format!("node-{number}")
}

impl World {
    fn new() -> World {
        let mut world = World {
            version: 10,
            claims: BTreeMap::new(),
            volumes: BTreeMap::new(),
            pods: BTreeMap::new(),
            gone: BTreeSet::new(),
            is_recreated: true,
            late: None,
            is_late: false,
        };
        for ordinal in 0..REPLICAS {
            world.create_claim(ordinal);
            world.create_pod(ordinal);
            world.provision(ordinal, ordinal / 2);
        }
        for stored in world.volumes.values_mut() {
            stored.is_whole = true;
        }
        world.happens(Happens::Kubernetes);
        world.happens(Happens::Rebuilt);
        world
    }

    fn next(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn create_claim(&mut self, ordinal: usize) {
        let version = self.next();
        let mut claim = claim(&format!("data-db-{ordinal}"), version);
        claim.metadata.resource_version = Some(version.to_string());
        claim.spec.as_mut().unwrap().volume_name = None;
        self.claims.insert(ordinal, claim);
    }

    fn create_pod(&mut self, ordinal: usize) {
        let uid = self.next();
        let mut pod = pod(ordinal as u64, None, false);
        pod.metadata.uid = Some(format!("pod-{uid}"));
        let replica = Replica {
            pod,
            has_node: false,
            is_ready: false,
        };
        self.pods.insert(ordinal, replica);
    }

    fn provision(&mut self, ordinal: usize, at: usize) {
        let version = self.next();
        let claim = self.claims.get_mut(&ordinal).unwrap();
        let name = format!("pv-{version}");
        claim.spec.as_mut().unwrap().volume_name = Some(name.clone());
        claim.metadata.resource_version = Some(version.to_string());
        let mut live = live(&claim.name_any(), 0);
        live.0.metadata.name = Some(name.clone());
        live.0.metadata.resource_version = Some(version.to_string());
        live.0.data["spec"]["claimRef"]["uid"] = json!(claim.metadata.uid);
        let stored = Stored {
            live,
            node: at,
            is_whole: false,
        };
        self.volumes.insert(name, stored);
    }

    fn stored(&self, ordinal: usize) -> Option<&Stored> {
        self.volumes.get(volume_of(self.claims.get(&ordinal)?)?)
    }

    fn is_running(&self, ordinal: usize) -> bool {
        let is_here = |stored: &Stored| !self.gone.contains(&stored.node);
        let replica = self.pods.get(&ordinal);
        let is_there = replica
            .is_some_and(|one| one.has_node && one.pod.metadata.deletion_timestamp.is_none());
        is_there && self.stored(ordinal).is_some_and(is_here)
    }

    fn is_whole(&self, ordinal: usize) -> bool {
        self.is_running(ordinal) && self.stored(ordinal).is_some_and(|one| one.is_whole)
    }

    fn seen(&self) -> Seen {
        let mut seen = lost();
        let spec = seen.sets[0].spec.as_mut().unwrap();
        spec.replicas = Some(i32::try_from(REPLICAS).unwrap());
        let templates = &mut spec.volume_claim_templates;
        templates.as_mut().unwrap().truncate(1);
        seen.claims = self.claims.values().cloned().collect();
        let pods = self.pods.iter().map(|(ordinal, replica)| {
            let its = self.stored(*ordinal).map(|stored| node(stored.node));
            let its = its.filter(|_| replica.has_node);
            let is_ready = replica.is_ready && self.is_running(*ordinal);
            let mut new = pod(*ordinal as u64, its.as_deref(), is_ready);
            new.metadata.uid.clone_from(&replica.pod.metadata.uid);
            let leaving = &replica.pod.metadata.deletion_timestamp;
            new.metadata.deletion_timestamp.clone_from(leaving);
            new
        });
        seen.pods = pods.collect();
        let here = (0..NODES).filter(|number| !self.gone.contains(number));
        seen.nodes = here.map(node).collect();
        if !self.is_recreated {
            seen.classes.clear();
        }
        let pool = seen.volumes.values().next().unwrap().pool;
        let bound = self.claims.values().filter_map(|claim| {
            let name = volume_of(claim)?;
            Some((claim, name, self.volumes.get(name)?))
        });
        let each = bound.filter_map(|(claim, name, stored)| {
            let is_gone = self.gone.contains(&stored.node);
            let volume = Volume {
                live: stored.live.clone(),
                pool,
                node: node(stored.node),
                loss: match is_gone {
                    true => Ok("it is gone".into()),
                    false => Err("it answers".into()),
                },
            };
            let is_marked = claim.labels().contains_key(MARK);
            let is_at_risk = is_gone || is_marked || stored.live.quarantined_from().is_some();
            is_at_risk.then(|| (name.to_string(), volume))
        });
        seen.volumes = each.collect();
        seen
    }

    /// Does changes until one names another version of its object than there is.
    fn execute(&mut self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            if self.change(change).is_none() {
                return;
            }
            self.check();
        }
    }

    fn change(&mut self, change: Change) -> Option<()> {
        let version = self.next().to_string();
        match change {
            Change::Mark { claim, .. } => {
                let mark = claim.metadata.resource_version.clone();
                let its = self.find(&claim)?;
                its.labels_mut().insert(MARK.into(), mark?);
                its.metadata.resource_version = Some(version);
            }
            Change::Unmark(claim) => {
                let its = self.find(&claim)?;
                its.labels_mut().remove(MARK);
                its.metadata.resource_version = Some(version);
            }
            Change::Retain { live, from, before } => {
                let set = [(QUARANTINED_FROM, from), (POLICY_BEFORE_QUARANTINE, before)];
                self.patch(&live, "Retain", &set, version)?;
            }
            Change::Restore(live) => {
                let before = live.policy_before_quarantine()?.to_string();
                self.patch(&live, &before, &[], version)?;
            }
            Change::DeleteClaim { claim, pool } => self.delete(&claim, pool.is_some(), version)?,
            Change::DeletePod { uid, .. } => {
                let mut all = self.pods.values_mut();
                let its = all.find(|one| one.pod.metadata.uid.as_ref() == Some(&uid))?;
                its.pod.metadata.deletion_timestamp = object(json!(time(0).to_string()));
            }
        }
        Some(())
    }

    fn find(&mut self, claim: &PersistentVolumeClaim) -> Option<&mut PersistentVolumeClaim> {
        self.claims.values_mut().find(|one| {
            let (its, named) = (&one.metadata, &claim.metadata);
            its.uid == named.uid && its.resource_version == named.resource_version
        })
    }

    fn patch(
        &mut self,
        live: &Manifest,
        policy: &str,
        set: &[(&str, String)],
        version: String,
    ) -> Option<()> {
        let stored = self.volumes.get_mut(live.name())?;
        if stored.live.version() != live.version() {
            return None;
        }
        let its = &mut stored.live.0;
        its.data["spec"]["persistentVolumeReclaimPolicy"] = json!(policy);
        let annotations = its.metadata.annotations.get_or_insert_default();
        annotations.remove(QUARANTINED_FROM);
        annotations.remove(POLICY_BEFORE_QUARANTINE);
        let set = set
            .iter()
            .map(|(key, value)| ((*key).to_string(), value.clone()));
        annotations.extend(set);
        its.metadata.resource_version = Some(version);
        Some(())
    }

    fn delete(
        &mut self,
        claim: &PersistentVolumeClaim,
        is_checked: bool,
        version: String,
    ) -> Option<()> {
        let volume = volume_of(claim)?.to_string();
        let at = self.volumes[&volume].node;
        if is_checked && !self.gone.contains(&at) {
            return None;
        }
        let its = self.find(claim)?;
        let was_leaving = is_leaving(its);
        its.metadata.deletion_timestamp = object(json!(time(0).to_string()));
        its.metadata.resource_version = Some(version);
        let its = its.clone();
        // Those that are deleted, or new and not rebuilt yet.
        let is_rebuilt = |one: &PersistentVolumeClaim| {
            let stored = volume_of(one).and_then(|name| self.volumes.get(name));
            !is_leaving(one) && stored.is_some_and(|stored| stored.is_whole)
        };
        let others = self.claims.values().filter(|one| **one != its);
        let others = others.filter(|one| !is_rebuilt(one)).count();
        assert!(was_leaving || others == 0, "two at a time: {self:?}");
        let whole = (0..REPLICAS).filter(|one| self.is_whole(*one)).count();
        // The other nodes may have ended since.
        let is_enough = whole * 2 > REPLICAS || self.is_late;
        assert!(was_leaving || is_enough, "too few: {self:?}");
        Some(())
    }

    /// Pods of nodes that are gone end, and so do claims that are being deleted and that no pod on a node
    /// uses. The StatefulSet creates both again, the scheduler selects nodes, and volumes are created.
    fn kubernetes(&mut self) {
        for ordinal in 0..REPLICAS {
            let is_gone = self
                .stored(ordinal)
                .is_some_and(|stored| self.gone.contains(&stored.node));
            let replica = self.pods.get(&ordinal);
            let ends = replica.is_some_and(|one| {
                one.pod.metadata.deletion_timestamp.is_some() || one.has_node && is_gone
            });
            if ends {
                self.pods.remove(&ordinal);
            }
            let has_node = self.pods.get(&ordinal).is_some_and(|one| one.has_node);
            if self.claims.get(&ordinal).is_some_and(is_leaving) && !has_node {
                self.claims.remove(&ordinal);
            }
            if !self.claims.contains_key(&ordinal) {
                self.create_claim(ordinal);
            }
            if !self.pods.contains_key(&ordinal) {
                self.create_pod(ordinal);
            }
            if self.claims.get(&ordinal).is_some_and(is_leaving) {
                continue;
            }
            if self.stored(ordinal).is_none() {
                let mut here = (0..NODES).filter(|number| !self.gone.contains(number));
                let at = here.next_back().unwrap();
                self.provision(ordinal, at);
            }
            let at = self.stored(ordinal).unwrap().node;
            if !self.gone.contains(&at) {
                self.pods.get_mut(&ordinal).unwrap().has_node = true;
            }
        }
    }

    fn happens(&mut self, what: Happens) {
        match what {
            Happens::Step(most) => {
                let plan = decide(&self.seen());
                self.execute(plan.changes.into_iter().take(most));
            }
            Happens::Observe => self.late = Some(decide(&self.seen())),
            Happens::Late => {
                let plan = self.late.take().unwrap_or_default();
                self.is_late = true;
                self.execute(plan.changes);
                self.is_late = false;
            }
            Happens::NodeEnds(number) => drop(self.gone.insert(number)),
            Happens::NodeReturns(number) => drop(self.gone.remove(&number)),
            Happens::Kubernetes => self.kubernetes(),
            Happens::Rebuilt => self.rebuilt(),
            Happens::OnNodeLost(is_recreated) => self.is_recreated = is_recreated,
        }
        self.check();
    }

    fn rebuilt(&mut self) {
        let running: Vec<_> = (0..REPLICAS).filter(|one| self.is_running(*one)).collect();
        for ordinal in 0..REPLICAS {
            let is_running = running.contains(&ordinal);
            if let Some(replica) = self.pods.get_mut(&ordinal) {
                replica.is_ready = is_running;
            }
            let volume = self.claims.get(&ordinal).and_then(volume_of);
            let stored = volume.and_then(|name| self.volumes.get_mut(name));
            if let Some(stored) = stored.filter(|_| is_running) {
                stored.is_whole = true;
            }
        }
    }

    /// A volume without its claim, or whose claim is being deleted, keeps its data.
    fn check(&self) {
        for stored in self.volumes.values() {
            let uid = stored.live.bound().unwrap().uid;
            let mut claims = self.claims.values().filter(|one| !is_leaving(one));
            let has_claim = claims.any(|one| one.metadata.uid.as_deref() == Some(&*uid));
            assert!(has_claim || stored.live.policy() == "Retain", "{self:?}");
        }
    }

    /// Everything is done that can be done.
    fn settle(&mut self) {
        for _ in 0..20 {
            self.happens(Happens::Step(9));
            self.happens(Happens::Kubernetes);
            self.happens(Happens::Rebuilt);
        }
    }
}

fn anything() -> impl Strategy<Value = Happens> {
    prop_oneof![
        6 => (1..4_usize).prop_map(Happens::Step),
        2 => Just(Happens::Observe),
        2 => Just(Happens::Late),
        2 => (0..NODES - 1).prop_map(Happens::NodeEnds),
        2 => (0..NODES - 1).prop_map(Happens::NodeReturns),
        3 => Just(Happens::Kubernetes),
        2 => Just(Happens::Rebuilt),
        1 => any::<bool>().prop_map(Happens::OnNodeLost),
    ]
}

#[test]
fn both_replicas_of_a_lost_node_are_created_again_one_after_the_other() {
    let mut world = World::new();
    world.happens(Happens::NodeEnds(1));
    world.settle();
    for ordinal in 0..REPLICAS {
        assert!(world.is_whole(ordinal), "{ordinal}: {world:?}");
    }
    let lost = world.volumes.values().filter(|stored| stored.node == 1);
    let kept = lost.filter(|stored| stored.live.quarantined_from().is_some());
    assert_eq!(kept.count(), 2);
}

proptest! {
    #[test]
    fn no_sequence_loses_data(all in proptest::collection::vec(anything(), 1..80)) {
        let mut world = World::new();
        for what in all {
            world.happens(what);
        }
        // All nodes are back: what was begun is undone or complete, and nothing is left of it.
        world.gone.clear();
        world.settle();
        for ordinal in 0..REPLICAS {
            prop_assert!(world.is_whole(ordinal), "{:?}", world);
            let claim = &world.claims[&ordinal];
            prop_assert!(!claim.labels().contains_key(MARK), "{:?}", world);
            let live = &world.stored(ordinal).unwrap().live;
            prop_assert_eq!(live.policy(), "Delete");
            prop_assert_eq!(live.quarantined_from(), None);
        }
    }
}
