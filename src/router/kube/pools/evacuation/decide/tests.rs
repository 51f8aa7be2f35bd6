//! Moves of a pool in a model of a cluster.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;

use super::*;
use crate::router::kube::moves::object::{FINALIZER, MoveStatus};
use crate::router::kube::orphans::StoredSnapshot;

const POOL: PoolId = PoolId(uuid::Uuid::from_u128(1));

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn handle(pool: u128, n: u128) -> String {
    let (pool, uuid) = (
        PoolId(uuid::Uuid::from_u128(pool)),
        uuid::Uuid::from_u128(n),
    );
    VolumeId { pool, uuid }.to_string()
}

/// A pool with volumes of claims, and the moves of a cluster.
#[derive(Clone, Debug, Default)]
struct World {
    is_evacuated: bool,
    /// The pool of the volume of each claim.
    claims: BTreeMap<String, u128>,
    unclaimed: u128,
    orphans: u128,
    snapshots: u128,
    is_agent_away: bool,
    moves: BTreeMap<String, VolumeMove>,
    seconds: i64,
}

fn number(claim: &str) -> u128 {
    claim.trim_start_matches("shop/c").parse().unwrap()
}

impl World {
    fn new(claims: u128) -> World {
        let all = (0..claims).map(|n| (format!("shop/c{n}"), 1));
        World {
            is_evacuated: true,
            claims: all.collect(),
            ..World::default()
        }
    }

    fn seen(&self) -> Seen {
        let here = self.claims.iter().filter(|(_, pool)| **pool == 1);
        let volume = |claim: &String| handle(1, number(claim));
        let claimed = here
            .clone()
            .map(|(claim, _)| (format!("pv-{claim}"), volume(claim), Some(claim.clone())));
        let rest = (0..self.unclaimed).map(|n| (format!("pv-{n}"), handle(1, 100 + n), None));
        let volumes: Vec<_> = claimed.chain(rest).collect();
        let orphans = (0..self.orphans).map(|n| handle(1, 200 + n));
        let snapshots = (0..self.snapshots).map(|n| StoredSnapshot {
            source: String::new(),
            id: handle(1, 300 + n),
            group: None,
        });
        let of_volumes = volumes.iter().map(|(_, handle, _)| handle.clone());
        let stored = Stored {
            pool: POOL,
            node: "a".into(),
            volumes: of_volumes.chain(orphans).collect(),
            snapshots: snapshots.collect(),
        };
        Seen {
            id: POOL,
            is_evacuated: self.is_evacuated,
            volumes,
            stored: (!self.is_agent_away).then_some(stored),
            its: self.moves.values().filter(is_labelled).cloned().collect(),
            all: self.moves.values().cloned().collect(),
            named: BTreeSet::new(),
            now: time(self.seconds),
        }
    }

    /// A pass of the controller.
    fn pass(&mut self) {
        let change = decide(&self.seen());
        for object in change.delete {
            let now = self.moves.get_mut(&object.path()).unwrap();
            match now.has_finalizer() {
                true => now.metadata.deletion_timestamp = Some(Time(time(self.seconds))),
                false => drop(self.moves.remove(&object.path())),
            }
        }
        for mut object in change.create.into_iter().take(change.at_most) {
            object.metadata.creation_timestamp = Some(Time(time(self.seconds)));
            let before = self.moves.insert(object.path(), object);
            assert!(before.is_none(), "it exists already: {before:?}");
        }
        // When pods end, each volume is copied for the last time.
        let is_early = |one: &&VolumeMove| is_copying(one) && phase(one) < Phase::Waiting;
        let copying = self.moves.values().filter(is_labelled).filter(is_early);
        assert!(copying.count() <= COPIES_AT_ONCE);
        let mut claims = BTreeSet::new();
        let active = self.moves.values().filter(|one| !phase(one).is_final());
        for object in active {
            assert!(
                claims.insert(object.claim()),
                "two moves of {}",
                object.claim()
            );
        }
    }

    /// The controller of moves takes one of them a phase further.
    fn proceed(&mut self, at: usize, aborts: bool) {
        let count = self.moves.len().max(1);
        let Some(object) = self.moves.values_mut().nth(at % count) else {
            return;
        };
        let status = object.status.get_or_insert_default();
        let next = match status.phase {
            _ if object.metadata.deletion_timestamp.is_some() && status.switched_at.is_none() => {
                Phase::Aborted
            }
            Phase::Pending => Phase::Copying,
            Phase::Copying => Phase::Waiting,
            Phase::Waiting if aborts => Phase::Aborted,
            Phase::Waiting => Phase::LastCopy,
            Phase::LastCopy => Phase::Switched,
            Phase::Switched => Phase::Done,
            phase => phase,
        };
        status.phase = next;
        let finalizers = (!next.is_final()).then(|| vec![FINALIZER.to_string()]);
        object.metadata.finalizers = finalizers;
        if next == Phase::Switched {
            status.switched_at = Some(Time(time(self.seconds)));
            self.claims.insert(object.claim(), 2);
        }
        let is_gone = next.is_final() && object.metadata.deletion_timestamp.is_some();
        let path = object.path();
        if is_gone {
            self.moves.remove(&path);
        }
    }
}

fn is_labelled(object: &&VolumeMove) -> bool {
    let labels = object.metadata.labels.as_ref();
    labels.is_some_and(|labels| labels.get(EVACUATES) == Some(&POOL.to_string()))
}

fn of_user(claim: &str) -> VolumeMove {
    let mut object = VolumeMove::default();
    object.metadata.name = Some("own".into());
    object.metadata.namespace = Some("shop".into());
    object.spec.claim = claim.into();
    object
}

#[test]
fn each_claim_gets_a_move_two_copies_at_a_time() {
    let mut world = World::new(5);
    let user = of_user("c4");
    world.moves.insert(user.path(), user);
    for expected in [3, 3] {
        world.pass();
        assert_eq!(world.moves.len(), expected, "and the one that existed");
    }
    let spec = world.moves.values().find(is_labelled).unwrap().spec.clone();
    assert_eq!(
        (spec.keep_source.as_deref(), spec.to),
        (Some("0s"), Default::default())
    );
    // One waits for its pods: another copy may begin. One waits for a target, and copies nothing.
    let mut its = world.moves.values_mut().filter(|one| is_labelled(&&**one));
    its.next().unwrap().status = Some(MoveStatus {
        phase: Phase::Waiting,
        ..MoveStatus::default()
    });
    its.next().unwrap().status = Some(MoveStatus {
        phase: Phase::Pending,
        message: "no pool matches".into(),
        ..MoveStatus::default()
    });
    world.pass();
    assert_eq!(world.moves.len(), 5);
    world.pass();
    assert_eq!(world.moves.len(), 5, "the claim of the user's move has one");
}

#[test]
fn without_evacuate_what_has_not_switched_is_undone() {
    let mut world = World::new(4);
    let user = of_user("c9");
    world.moves.insert(user.path(), user);
    for _ in 0..4 {
        world.pass();
        (0..4).for_each(|at| world.proceed(at, false));
    }
    let phases = |world: &World| {
        let its = world.moves.values().filter(is_labelled);
        its.map(|one| (phase(one), one.is_leaving()))
            .collect::<Vec<_>>()
    };
    let before = phases(&world);
    assert!(
        before.iter().any(|(phase, _)| *phase == Phase::Switched),
        "{before:?}"
    );
    assert!(
        before.iter().any(|(phase, _)| *phase < Phase::Switched),
        "{before:?}"
    );
    world.is_evacuated = false;
    world.pass();
    for (phase, is_leaving) in phases(&world) {
        assert_eq!(is_leaving, phase < Phase::Switched, "{phase:?}");
    }
    for _ in 0..8 {
        (0..8).for_each(|at| world.proceed(at, false));
        world.pass();
    }
    let left: Vec<_> = world.moves.keys().collect();
    assert_eq!(left, ["shop/own"]);
}

#[test]
fn an_undone_move_is_tried_again_after_ten_minutes() {
    let mut world = World::new(1);
    world.pass();
    (0..3).for_each(|_| world.proceed(0, true));
    assert_eq!(phase(world.moves.values().next().unwrap()), Phase::Aborted);
    world.seconds = 599;
    world.pass();
    assert_eq!(phase(world.moves.values().next().unwrap()), Phase::Aborted);
    world.seconds = 600;
    world.pass();
    assert!(world.moves.is_empty());
    world.pass();
    assert_eq!(phase(world.moves.values().next().unwrap()), Phase::Pending);
}

#[test]
fn what_is_left_is_known_completely_or_not_at_all() {
    let mut world = World::new(0);
    assert_eq!(left(&world.seen()).unwrap(), Evacuation::default());
    world.is_agent_away = true;
    assert!(left(&world.seen()).is_err());
    world = World::new(2);
    (world.unclaimed, world.orphans, world.snapshots) = (1, 60, 3);
    let mut seen = world.seen();
    seen.named.insert(handle(1, 200));
    let found = left(&seen).unwrap();
    assert_eq!(found.left, 66);
    assert_eq!((found.claims.len(), found.unclaimed.len()), (2, 1));
    assert_eq!((found.sources.len(), found.orphans.len()), (1, 50));
    assert_eq!(found.snapshots.len(), 3);
    let words = crate::router::kube::pools::evacuation::remaining::summary(&found);
    assert!(
        words.contains("50 volumes that no object names or more"),
        "{words}"
    );
    assert!(
        words.contains("2 volumes of claims, 1 volumes without a claim"),
        "{words}"
    );
}

proptest! {
    #[test]
    fn whatever_the_moves_do_the_pool_gets_empty(
        claims in 0_u128..6,
        events in proptest::collection::vec((0_usize..10, any::<bool>(), 0_i64..300), 0..60),
    ) {
        let mut world = World::new(claims);
        for (at, aborts, seconds) in events {
            world.seconds += seconds;
            match at {
                8 => world.is_evacuated = aborts,
                9 => world.is_agent_away = aborts,
                at => world.proceed(at, aborts),
            }
            world.pass();
        }
        (world.is_evacuated, world.is_agent_away) = (true, false);
        for _ in 0..60 {
            world.seconds += 100;
            (0..6).for_each(|at| world.proceed(at, false));
            world.pass();
        }
        prop_assert_eq!(left(&world.seen()).unwrap().left, 0);
    }
}
