//! Shares whose coordinator goes away at any step, on a simulated machine.

use super::*;
use crate::host::memory::MemoryHost;
use crate::model::PoolId;
use crate::operation::tests::{driver, volume};
use crate::operation::{Driver, GroupDecision, NamedGroup};

/// A volume on another node.
pub(in crate::operation) fn far() -> VolumeId {
    VolumeId {
        pool: PoolId(Uuid::from_u128(1)),
        uuid: Uuid::from_u128(2),
    }
}

pub(in crate::operation) fn begin(
    group: Option<GroupId>,
    all: &[VolumeId],
    ours: &[VolumeId],
) -> BeginParticipation {
    BeginParticipation {
        name: "g".into(),
        group,
        attempt: Uuid::new_v4(),
        parameters: SnapshotParameters::default(),
        volume_ids: ours.iter().map(VolumeId::to_string).collect(),
        all_volumes: all.to_vec(),
        level: Level::Filesystem,
        requisite: Vec::new(),
    }
}

pub(in crate::operation) fn kept() -> VerifiedCut {
    VerifiedCut {
        cut_at: 7,
        level: Level::Filesystem,
        reason: String::new(),
    }
}

pub(in crate::operation) fn all_steps() -> Vec<ParticipationStep> {
    vec![
        ParticipationStep::Cut(CutStep::Ready(Level::Filesystem)),
        ParticipationStep::Cut(CutStep::Ahead { hooks: true }),
        ParticipationStep::Cut(CutStep::Prepare),
        ParticipationStep::Cut(CutStep::Freeze),
        ParticipationStep::Cut(CutStep::Cut),
        ParticipationStep::Cut(CutStep::Written),
        ParticipationStep::Keep(kept()),
        ParticipationStep::Commit,
    ]
}

/// A coordinator that sends these steps and then ends.
struct Script {
    steps: std::vec::IntoIter<ParticipationStep>,
    reported: Vec<ParticipationAnswer>,
}

impl Script {
    fn of(steps: Vec<ParticipationStep>) -> Script {
        Script {
            steps: steps.into_iter(),
            reported: Vec::new(),
        }
    }
}

impl Coordinator for Script {
    fn next(&mut self) -> Option<ParticipationStep> {
        self.steps.next()
    }

    fn send_reply(&mut self, answer: ParticipationAnswer) {
        self.reported.push(answer);
    }
}

pub(in crate::operation) fn served(
    driver: &Driver,
    begin: &BeginParticipation,
    steps: Vec<ParticipationStep>,
) -> (Result<()>, usize) {
    let mut script = Script::of(steps);
    let done = driver
        .snapshots
        .serve_participation(begin, &AbortHandle::default(), &mut script);
    assert_eq!(driver.pools.locks_held(), 0);
    (done, script.reported.len())
}

pub(in crate::operation) fn states(driver: &Driver, group: GroupId) -> Vec<SnapshotState> {
    let here = driver.snapshots.group_here(group, &[]).unwrap();
    assert!(!here.busy);
    here.members.iter().map(|member| member.state).collect()
}

pub(in crate::operation) const GROUP: GroupId = GroupId(Uuid::from_u128(77));

#[test]
fn where_the_first_member_is_the_end_of_the_steps_deletes_everything_until_the_commit() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a"), volume(&driver, "b")];
    let all = [ours[0], far(), ours[1]];
    for count in 0..all_steps().len() {
        let mut steps = all_steps();
        steps.truncate(count);
        let (done, reported) = served(&driver, &begin(Some(GROUP), &all, &ours), steps);
        assert!(done.is_ok(), "{count}: {done:?}");
        assert_eq!(reported, count + 1);
        assert_eq!(states(&driver, GROUP), [], "after {count} steps");
    }
    let (done, _) = served(&driver, &begin(Some(GROUP), &all, &ours), all_steps());
    done.unwrap();
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready; 2]);
    // A committed group is not cut again.
    let (done, reported) = served(&driver, &begin(Some(GROUP), &all, &ours), all_steps());
    assert!(matches!(done, Err(Error::Pending { .. })), "{done:?}");
    assert_eq!(reported, 0);
    let named = NamedGroup {
        group_id: GROUP.to_string(),
        snapshot_ids: Vec::new(),
    };
    let error = driver.snapshots.get_group(&named).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    driver.snapshots.delete_group_here(GROUP, &[]).unwrap();
    assert_eq!(states(&driver, GROUP), []);
}

#[test]
fn what_another_node_decides_about_stays_in_doubt_until_its_decision_is_known() {
    let host = MemoryHost::new();
    let mut driver = driver(&host);
    let ours = [volume(&driver, "a")];
    let all = [far(), ours[0]];
    for commits in [false, true] {
        let mut steps = all_steps();
        steps.pop();
        let begun = begin(Some(GROUP), &all, &ours);
        served(&driver, &begun, steps).0.unwrap();
        // Neither a refresh nor a restart resolves the group.
        driver.refresh_pools();
        driver.leave();
        driver = self::driver(&host.restart_process());
        assert_eq!(states(&driver, GROUP), [SnapshotState::Cut]);
        let (done, _) = served(&driver, &begin(Some(GROUP), &all, &ours), all_steps());
        assert!(matches!(done, Err(Error::Pending { .. })), "{done:?}");
        // A decision about another attempt does not apply to this one.
        let other = GroupDecision {
            commit: Some(Uuid::new_v4()),
            undo: vec![Uuid::new_v4()],
        };
        driver.snapshots.resolve_group_by(GROUP, &other).unwrap();
        assert_eq!(states(&driver, GROUP), [SnapshotState::Cut]);
        let decision = match commits {
            true => GroupDecision {
                commit: Some(begun.attempt),
                undo: Vec::new(),
            },
            false => GroupDecision {
                commit: None,
                undo: vec![begun.attempt],
            },
        };
        for _ in 0..2 {
            driver.snapshots.resolve_group_by(GROUP, &decision).unwrap();
        }
        match commits {
            true => assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]),
            false => assert_eq!(states(&driver, GROUP), []),
        }
    }
    driver.snapshots.delete_group_here(GROUP, &[]).unwrap();
}

#[test]
fn a_first_member_on_a_pool_that_this_node_has_forgotten_is_not_gone() {
    let host = MemoryHost::new();
    let before = driver(&host);
    let ours = [volume(&before, "a")];
    // The disk of this pool was on this node, and is on another node by now.
    let moved = far();
    before.leave();
    let host = host.restart_process();
    let path = std::path::Path::new("/var/lib/slackwater/node.json");
    let node = crate::host::Host::read_file(&host, path).unwrap().unwrap();
    let mut node: serde_json::Value = serde_json::from_slice(&node).unwrap();
    let known = node["pools"][ours[0].pool.to_string()].clone();
    node["forgotten"][moved.pool.to_string()] = known;
    host.put_file(path, node.to_string().as_bytes()).unwrap();

    let driver = driver(&host);
    let all = [moved, ours[0]];
    let mut steps = all_steps();
    steps.pop();
    for commits in [true, false] {
        let begun = begin(Some(GROUP), &all, &ours);
        served(&driver, &begun, steps.clone()).0.unwrap();
        driver.refresh_pools();
        assert_eq!(states(&driver, GROUP), [SnapshotState::Cut], "a guess");
        let decision = match commits {
            true => GroupDecision {
                commit: Some(begun.attempt),
                undo: Vec::new(),
            },
            false => GroupDecision {
                commit: None,
                undo: vec![begun.attempt],
            },
        };
        driver.snapshots.resolve_group_by(GROUP, &decision).unwrap();
        match commits {
            true => assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]),
            false => assert_eq!(states(&driver, GROUP), []),
        }
        driver.snapshots.delete_group_here(GROUP, &[]).unwrap();
    }
}

#[test]
fn a_single_snapshot_is_never_in_doubt_and_what_is_there_is_not_cut_again() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    for count in 0..all_steps().len() {
        let mut steps = all_steps();
        steps.truncate(count);
        served(&driver, &begin(None, &[], &ours), steps).0.unwrap();
        let found = driver.snapshots.find_snapshot_name("g").unwrap();
        assert!(found.is_none(), "after {count} steps");
    }
    served(&driver, &begin(None, &[], &ours), all_steps())
        .0
        .unwrap();
    assert!(driver.snapshots.find_snapshot_name("g").unwrap().is_some());
    let mut script = Script::of(all_steps());
    let again = begin(None, &[], &ours);
    let done = driver
        .snapshots
        .serve_participation(&again, &AbortHandle::default(), &mut script);
    done.unwrap();
    assert_eq!(script.reported, [ParticipationAnswer::Plain]);
}

/// A coordinator that counts the locks when the commit is reported.
struct AtCommit<'a> {
    driver: &'a Driver,
    steps: std::vec::IntoIter<ParticipationStep>,
    held: Option<usize>,
}

impl Coordinator for AtCommit<'_> {
    fn next(&mut self) -> Option<ParticipationStep> {
        self.steps.next()
    }

    fn send_reply(&mut self, answer: ParticipationAnswer) {
        if answer == ParticipationAnswer::Committed {
            self.held = Some(self.driver.pools.locks_held());
        }
    }
}

/// Otherwise the coordinator's next query about the group could be answered with ABORTED.
#[test]
fn a_commit_is_reported_after_the_locks_were_released() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    for group in [None, Some(GROUP)] {
        let mut coordinator = AtCommit {
            driver: &driver,
            steps: all_steps().into_iter(),
            held: None,
        };
        let all: &[VolumeId] = if group.is_some() { &ours } else { &[] };
        let begin = begin(group, all, &ours);
        driver
            .snapshots
            .serve_participation(&begin, &AbortHandle::default(), &mut coordinator)
            .unwrap();
        assert_eq!(coordinator.held, Some(0), "{group:?}");
    }
}

#[test]
fn steps_out_of_order_end_it_and_leave_nothing() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    for (at, wrong) in [
        (0, ParticipationStep::Cut(CutStep::Freeze)),
        (1, ParticipationStep::Cut(CutStep::Cut)),
        (3, ParticipationStep::Keep(kept())),
        (5, ParticipationStep::Commit),
        (6, ParticipationStep::Cut(CutStep::Freeze)),
    ] {
        let mut steps = all_steps();
        steps.truncate(at);
        steps.push(wrong);
        let (done, reported) = served(&driver, &begin(Some(GROUP), &ours, &ours), steps);
        assert!(matches!(done, Err(Error::Invalid { .. })), "{at}: {done:?}");
        assert_eq!(reported, at + 1);
        assert_eq!(states(&driver, GROUP), [], "{at}");
    }
}

/// A coordinator that reads the group when a step fails.
struct Early<'a> {
    driver: &'a Driver,
    steps: std::vec::IntoIter<ParticipationStep>,
    seen: Option<Vec<SnapshotState>>,
}

impl Coordinator for Early<'_> {
    fn next(&mut self) -> Option<ParticipationStep> {
        self.steps.next()
    }

    fn send_reply(&mut self, _answer: ParticipationAnswer) {}

    fn failing(&mut self, _error: &Error) {
        let here = self.driver.snapshots.group_here(GROUP, &[]).unwrap();
        self.seen = Some(here.members.iter().map(|member| member.state).collect());
    }
}

#[test]
fn a_step_that_fails_is_reported_before_anything_is_deleted() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    let mut early = Early {
        driver: &driver,
        steps: vec![ParticipationStep::Cut(CutStep::Freeze)].into_iter(),
        seen: None,
    };
    let begun = begin(Some(GROUP), &ours, &ours);
    let done = driver
        .snapshots
        .serve_participation(&begun, &AbortHandle::default(), &mut early);
    assert!(done.is_err());
    assert_eq!(early.seen, Some(vec![SnapshotState::Preparing]));
    assert_eq!(states(&driver, GROUP), []);
}

#[test]
fn a_router_that_does_not_know_the_step_ahead_of_the_hooks_is_served() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    let mut steps = all_steps();
    steps.retain(|step| !matches!(step, ParticipationStep::Cut(CutStep::Ahead { .. })));
    let (done, _) = served(&driver, &begin(Some(GROUP), &ours, &ours), steps);
    done.unwrap();
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]);
}
