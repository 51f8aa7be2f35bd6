//! Reverts in a model of a cluster: whatever happens at any point, all members have their new content in
//! the end, or all have kept the old one, and nothing stays fenced.

use ::kube::api::ObjectMeta;
use proptest::prelude::*;
use slackwater_testkit::Sweep;

use super::*;
use crate::router::kube::reverts::object::{FINALIZER, RevertSpec};

const UID: Uuid = Uuid::from_u128(7);
const OTHER: Uuid = Uuid::from_u128(8);

/// What a volume has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// What its application has written.
    Own,
    Snapshot,
}

/// A volume as its agent keeps it, with the rules of `operation/volume/reverting.rs`.
#[derive(Clone, Debug)]
struct Volume {
    seen: VolumeRevertStatus,
    content: Content,
    has_claim: bool,
    has_snapshot: bool,
    has_old: bool,
    is_away: bool,
    is_used: bool,
}

impl Volume {
    fn new() -> Volume {
        Volume {
            seen: VolumeRevertStatus {
                exists: true,
                number: 3,
                ..VolumeRevertStatus::default()
            },
            content: Content::Own,
            has_claim: true,
            has_snapshot: true,
            has_old: false,
            is_away: false,
            is_used: false,
        }
    }

    fn end(&mut self, is_done: bool) {
        self.seen.number += 1;
        self.seen.ended = Some((UID, is_done));
        self.seen.fenced = None;
        (self.seen.is_prepared, self.seen.is_switched) = (false, false);
    }

    /// A request of the revert.
    fn order(&mut self, step: Step, planned: u64) -> Result<(), Code> {
        if self.is_away {
            return Err(Code::Unavailable);
        }
        let is_mine = self.seen.fenced == Some(UID);
        let ended = self.seen.ended.filter(|(uid, _)| *uid == UID);
        match (step, ended) {
            (Step::Abort(_), Some((_, false))) => return Ok(()),
            (Step::Abort(_), Some((_, true))) => return Err(Code::FailedPrecondition),
            (_, Some((_, true))) => return Ok(()),
            (_, Some((_, false))) => return Err(Code::FailedPrecondition),
            (_, None) => {}
        }
        let refused = Err(Code::FailedPrecondition);
        match step {
            Step::Fence(_) if is_mine => {}
            Step::Fence(_) => {
                let is_planned = self.seen.number == planned;
                if self.seen.fenced.is_some() || self.is_used || !is_planned {
                    return refused;
                }
                if !self.has_snapshot {
                    return Err(Code::NotFound);
                }
                self.seen.fenced = Some(UID);
            }
            Step::Prepare if !is_mine => return refused,
            Step::Prepare if self.seen.is_prepared || self.seen.is_switched => {}
            Step::Prepare if !self.has_snapshot => return Err(Code::NotFound),
            Step::Prepare => self.seen.is_prepared = true,
            Step::Switch(_) if !is_mine => return refused,
            Step::Switch(_) if self.seen.is_switched => {}
            Step::Switch(_) if !self.seen.is_prepared => return refused,
            Step::Switch(_) => {
                assert!(!self.is_used, "a used volume was switched");
                (self.seen.is_prepared, self.seen.is_switched) = (false, true);
                self.content = Content::Snapshot;
            }
            Step::Lift(_) if !is_mine || !self.seen.is_switched => return refused,
            Step::Lift(_) => self.end(true),
            Step::Abort(_) if is_mine && self.seen.is_switched => return refused,
            Step::Abort(_) if is_mine => self.end(false),
            Step::Abort(_) if self.seen.fenced.is_some() || self.seen.number != planned => {}
            Step::Abort(_) => self.end(false),
            Step::AddFinalizer | Step::RemoveFinalizer | Step::Keep(_) => unreachable!(),
        }
        Ok(())
    }

    fn look(&self) -> Result<VolumeRevertStatus, String> {
        if self.is_away {
            return Err("it does not answer".into());
        }
        let is_free = self.seen.fenced.is_none();
        Ok(VolumeRevertStatus {
            user: (is_free && self.is_used).then(|| "it is mounted".into()),
            unfit: (is_free && !self.has_snapshot).then(|| "no snapshot".into()),
            ..self.seen.clone()
        })
    }
}

#[derive(Clone, Debug)]
struct World {
    object: Option<VolumeRevert>,
    volumes: Vec<Volume>,
    /// Requests that are still on their way, with the number of their volume.
    late: Vec<(Step, usize)>,
    seconds: i64,
    version: u64,
}

fn member(n: usize) -> RevertMember {
    RevertMember {
        claim: format!("claim-{n}"),
        handle: format!("volume-{n}"),
        number: 3,
        ..RevertMember::default()
    }
}

/// The requests of a step, as `execute` sends them.
fn requests(seen: &Observed, step: Step) -> Vec<(Step, usize)> {
    let is_open = |member: &MemberSeen| {
        let volume = member.volume.as_ref().ok();
        volume.is_some_and(|it| it.fenced == Some(UID) && !it.is_prepared && !it.is_switched)
    };
    match step {
        Step::AddFinalizer | Step::RemoveFinalizer => Vec::new(),
        Step::Prepare => {
            let members = seen.members.iter().enumerate();
            let open = members.filter(|(_, member)| is_open(member));
            open.map(|(n, _)| (step, n)).collect()
        }
        Step::Fence(n) | Step::Keep(n) | Step::Switch(n) | Step::Lift(n) | Step::Abort(n) => {
            vec![(step, n)]
        }
    }
}

impl World {
    fn new(members: usize, keep_old: bool) -> World {
        let object = VolumeRevert {
            metadata: ObjectMeta {
                uid: Some(UID.to_string()),
                creation_timestamp: Some(Time(Timestamp::from_second(0).unwrap())),
                generation: Some(1),
                resource_version: Some("0".into()),
                ..ObjectMeta::default()
            },
            spec: RevertSpec {
                keep_old,
                deadline: Some("100s".into()),
                ..RevertSpec::default()
            },
            ..VolumeRevert::default()
        };
        World {
            object: Some(object),
            volumes: vec![Volume::new(); members],
            late: Vec::new(),
            seconds: 1,
            version: 0,
        }
    }

    fn observe(&self) -> Option<Observed> {
        let object = self.object.clone()?;
        let status = object.status.clone().unwrap_or_default();
        let is_planned = !status.members.is_empty();
        let fits = self.volumes.iter().all(|it| it.has_claim && !it.is_away);
        let proposal = match fits {
            true => Ok((0..self.volumes.len()).map(member).collect()),
            false => Err(Refusal {
                reason: "NoClaim",
                message: "a claim is missing".into(),
                is_final: false,
            }),
        };
        let members = self.volumes.iter().map(|volume| MemberSeen {
            is_bound: volume.has_claim,
            volume: volume.look(),
            old: match volume.has_old {
                true => Old::Ready,
                false => Old::Absent,
            },
            pods: vec!["pod".into()],
        });
        Some(Observed {
            now: Timestamp::from_second(self.seconds).unwrap(),
            proposal: (!is_planned).then_some(proposal),
            members: if is_planned {
                members.collect()
            } else {
                Vec::new()
            },
            object,
        })
    }

    /// A write of the object, which names its version.
    fn write(&mut self, seen: &Observed, change: impl FnOnce(&mut VolumeRevert)) {
        let Some(object) = &mut self.object else {
            return;
        };
        if object.metadata.resource_version != seen.object.metadata.resource_version {
            return;
        }
        change(object);
        self.version += 1;
        object.metadata.resource_version = Some(self.version.to_string());
        if object.is_leaving() && !object.has_finalizer() {
            self.object = None;
        }
    }

    /// Does what a router has decided, as `execute` does.
    fn act(&mut self, seen: &Observed, is_delayed: bool) {
        let decision = decide(seen);
        let before = seen.object.status.clone().unwrap_or_default();
        if decision.status != before {
            self.write(seen, |object| object.status = Some(decision.status));
            return;
        }
        let Some(step) = decision.step else {
            return;
        };
        match step {
            Step::AddFinalizer => self.write(seen, |object| {
                object.metadata.finalizers = Some(vec![FINALIZER.into()]);
            }),
            Step::RemoveFinalizer => self.write(seen, |object| object.metadata.finalizers = None),
            // It is taken under the fence.
            Step::Keep(n) => {
                let volume = &mut self.volumes[n];
                volume.has_old |= volume.seen.fenced == Some(UID) && !volume.seen.is_switched;
            }
            step if is_delayed => self.late.extend(requests(seen, step)),
            step => {
                let requests = requests(seen, step).into_iter();
                let answers = requests.map(|request| self.order(request));
                let answers: Vec<_> = answers.collect();
                let is_refused = |answer: &Result<(), Code>| {
                    answer.is_err_and(|code| step.gives_up(before.phase, code))
                };
                if answers.iter().any(is_refused) {
                    let status = given_up(seen, "refused");
                    self.write(seen, |object| object.status = Some(status));
                }
            }
        }
    }

    fn order(&mut self, (step, n): (Step, usize)) -> Result<(), Code> {
        self.volumes[n].order(step, 3)
    }

    fn phase(&self) -> Option<Phase> {
        let object = self.object.as_ref()?;
        Some(object.status.clone().unwrap_or_default().phase)
    }

    fn is_fenced(&self) -> bool {
        self.volumes.iter().any(|it| it.seen.fenced == Some(UID))
    }

    /// Whether an application may use a volume: then all of the revert must be decided.
    fn check(&self) {
        let open = self.volumes.iter().filter(|it| it.seen.fenced.is_none());
        let mut ended = open.filter_map(|it| it.seen.ended.filter(|(uid, _)| *uid == UID));
        let is_reverted = ended.any(|(_, is_done)| is_done);
        let is_kept = self
            .volumes
            .iter()
            .any(|it| it.seen.ended == Some((UID, false)));
        assert!(!(is_reverted && is_kept), "a part is reverted: {self:?}");
        if is_reverted {
            for volume in &self.volumes {
                let has_new = volume.seen.is_switched || volume.seen.ended == Some((UID, true));
                assert!(has_new, "used before all have switched: {self:?}");
            }
        }
        let Some(phase) = self.phase().filter(|phase| phase.is_final()) else {
            return;
        };
        assert!(!self.is_fenced(), "{phase:?} with a fence: {self:?}");
        for volume in &self.volumes {
            let is_done = volume.seen.ended == Some((UID, true));
            assert_eq!(is_done, phase == Phase::Done, "{self:?}");
        }
    }

    /// Nothing stays in the way, and the router comes to an end.
    fn settle(&mut self) {
        for volume in &mut self.volumes {
            (volume.is_away, volume.is_used) = (false, false);
        }
        self.seconds += 1000;
        for _ in 0..100 {
            let Some(seen) = self.observe() else { break };
            self.act(&seen, false);
            self.check();
        }
        let is_over = self.phase().is_none_or(Phase::is_final);
        assert!(is_over && !self.is_fenced(), "it does not end: {self:?}");
        // What arrives now has no effect.
        for volume in &mut self.volumes {
            volume.content = Content::Own;
        }
        for request in std::mem::take(&mut self.late) {
            let _ = self.order(request);
        }
        assert!(!self.is_fenced(), "a late request has fenced: {self:?}");
        let is_kept = self.volumes.iter().all(|it| it.content == Content::Own);
        assert!(is_kept, "a late request has reverted: {self:?}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Pass,
    /// A router decides, and its request arrives much later.
    Delayed,
    /// A router that has observed before acts now.
    Stale,
    Arrive(usize),
    /// A request arrives a second time.
    Again(usize),
    PodStarts(usize),
    PodEnds(usize),
    Leaves(usize),
    Returns(usize),
    DeleteObject,
    DeleteClaim(usize),
    DeleteSnapshot(usize),
    OtherRevert(usize),
    Wait,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let n = || 0..3usize;
    let act = prop_oneof![
        20 => Just(Act::Pass),
        2 => Just(Act::Delayed),
        3 => Just(Act::Stale),
        2 => n().prop_map(Act::Arrive),
        2 => n().prop_map(Act::Again),
        2 => n().prop_map(Act::PodStarts),
        4 => n().prop_map(Act::PodEnds),
        1 => n().prop_map(Act::Leaves),
        2 => n().prop_map(Act::Returns),
        1 => Just(Act::DeleteObject),
        1 => n().prop_map(Act::DeleteClaim),
        1 => n().prop_map(Act::DeleteSnapshot),
        1 => n().prop_map(Act::OtherRevert),
        1 => Just(Act::Wait),
    ];
    prop::collection::vec(act, 0..60)
}

fn run(world: &mut World, acts: &[Act]) {
    let mut old = None;
    for act in acts {
        let of = |n: &usize| *n % world.volumes.len();
        match act {
            Act::Pass | Act::Delayed => {
                if let Some(seen) = world.observe() {
                    world.act(&seen, matches!(act, Act::Delayed));
                    old = Some(seen);
                }
            }
            Act::Stale => {
                if let Some(seen) = &old {
                    world.act(seen, false);
                }
            }
            Act::Arrive(n) | Act::Again(n) if !world.late.is_empty() => {
                let n = n % world.late.len();
                let request = match act {
                    Act::Again(_) => world.late[n],
                    _ => world.late.remove(n),
                };
                let _ = world.order(request);
            }
            Act::Arrive(_) | Act::Again(_) => {}
            Act::PodStarts(n) => {
                let n = of(n);
                let volume = &mut world.volumes[n];
                volume.is_used |= volume.seen.fenced.is_none();
            }
            Act::PodEnds(n) => {
                let n = of(n);
                world.volumes[n].is_used = false;
            }
            Act::Leaves(n) | Act::Returns(n) => {
                let n = of(n);
                world.volumes[n].is_away = matches!(act, Act::Leaves(_));
            }
            Act::DeleteObject => {
                if let Some(seen) = world.observe() {
                    let now = Time(Timestamp::from_second(world.seconds).unwrap());
                    world.write(&seen, |object| {
                        object.metadata.deletion_timestamp = Some(now);
                    });
                }
            }
            Act::DeleteClaim(n) => {
                let n = of(n);
                world.volumes[n].has_claim = false;
            }
            Act::DeleteSnapshot(n) => {
                let n = of(n);
                world.volumes[n].has_snapshot = false;
            }
            // It begins and ends between two observations.
            Act::OtherRevert(n) => {
                let n = of(n);
                let seen = &mut world.volumes[n].seen;
                if seen.fenced.is_none() && seen.ended.is_none() {
                    seen.number += 1;
                    seen.ended = Some((OTHER, true));
                }
            }
            Act::Wait => world.seconds += 30,
        }
        world.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(Sweep::requested().random(3000)))]

    #[test]
    fn a_revert_is_of_all_members_or_of_none(acts in acts(), members in 1..4usize, keep_old: bool) {
        let mut world = World::new(members, keep_old);
        run(&mut world, &acts);
        world.settle();
    }
}

/// The phases of a revert of two members that nothing disturbs.
fn phases(world: &mut World, passes: usize) -> Vec<Phase> {
    let mut phases = Vec::new();
    for _ in 0..passes {
        let Some(seen) = world.observe() else { break };
        world.act(&seen, false);
        world.check();
        phases.extend(world.phase().filter(|phase| phases.last() != Some(phase)));
    }
    phases
}

#[test]
fn a_revert_fences_all_keeps_the_old_content_prepares_all_and_switches_all() {
    let mut world = World::new(2, true);
    let all = [
        Phase::Pending,
        Phase::Waiting,
        Phase::Fencing,
        Phase::Keeping,
        Phase::Preparing,
        Phase::Switching,
        Phase::Done,
    ];
    assert_eq!(phases(&mut world, 60), all);
    assert!(world.volumes.iter().all(|it| it.has_old));
    let status = world.object.unwrap().status.unwrap();
    for (n, member) in status.members.iter().enumerate() {
        let old = format!("before-revert-{UID}-{n}");
        assert_eq!(member.state, MemberState::Reverted);
        assert_eq!(member.old, Some(old));
    }
    assert!(status.finished_at.is_some());
    let condition = &status.conditions[0];
    assert_eq!(
        (&*condition.type_, &*condition.status),
        ("Complete", "True")
    );
}

#[test]
fn the_old_content_is_kept_again_if_its_snapshot_is_deleted_before_the_switch() {
    let mut world = World::new(2, true);
    while world.phase() != Some(Phase::Preparing) {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    world.volumes[1].has_old = false;
    assert_eq!(phases(&mut world, 60).last(), Some(&Phase::Done));
    assert!(world.volumes.iter().all(|it| it.has_old));
}

/// A member whose content is not known keeps no other one fenced.
#[test]
fn other_members_are_lifted_when_the_fence_of_one_is_gone() {
    let mut world = World::new(2, false);
    while !world.volumes.iter().all(|it| it.seen.is_switched) {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    world.volumes[0].seen.fenced = None;
    for _ in 0..20 {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    assert!(!world.is_fenced());
    let why = "the fence of claim claim-0 is gone, and its content is not known";
    assert_eq!(ended_without_a_member(&world), why);
}

/// The message of a revert that has ended although it could not revert all members.
fn ended_without_a_member(world: &World) -> String {
    let object = world.object.clone().unwrap();
    assert!(!object.has_finalizer(), "it is let go");
    let status = object.status.unwrap();
    assert_eq!(status.phase, Phase::Incomplete);
    assert_eq!(status.conditions[0].status, "False");
    assert_eq!(status.members[1].state, MemberState::Reverted);
    status.message
}

#[test]
fn a_member_that_is_lost_after_the_switch_is_named_and_the_others_are_reverted() {
    for is_switched in [false, true] {
        let mut world = World::new(2, false);
        while world.phase() != Some(Phase::Switching)
            || world.volumes[0].seen.is_switched != is_switched
        {
            let seen = world.observe().unwrap();
            world.act(&seen, false);
        }
        world.volumes[0].seen = VolumeRevertStatus::default();
        for _ in 0..20 {
            let seen = world.observe().unwrap();
            world.act(&seen, false);
        }
        assert!(!world.is_fenced());
        let message = ended_without_a_member(&world);
        assert_eq!(message, "the volume of claim claim-0 is lost");
        let status = world.object.unwrap().status.unwrap();
        assert_eq!(status.members[0].state, MemberState::Lost);
    }
}

#[test]
fn a_volume_that_is_deleted_after_its_revert_is_not_lost() {
    let mut world = World::new(2, false);
    let states = |world: &World| {
        let status = world.object.clone().unwrap().status.unwrap();
        status.members.iter().map(|it| it.state).collect::<Vec<_>>()
    };
    while world.phase() != Some(Phase::Switching) || states(&world)[0] != MemberState::Reverted {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    world.volumes[0].seen = VolumeRevertStatus::default();
    for _ in 0..20 {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    assert_eq!(world.phase(), Some(Phase::Done));
    assert_eq!(states(&world), [MemberState::Reverted; 2]);
}

#[test]
fn only_a_refusal_before_the_first_switch_undoes_a_revert() {
    let prepare = Step::Prepare;
    assert!(prepare.gives_up(Phase::Preparing, Code::ResourceExhausted));
    assert!(!prepare.gives_up(Phase::Preparing, Code::Aborted));
    assert!(!prepare.gives_up(Phase::Switching, Code::ResourceExhausted));
    assert!(!Step::Fence(0).gives_up(Phase::Fencing, Code::FailedPrecondition));
}

#[test]
fn what_has_not_begun_in_time_fails_for_good_and_names_the_pods() {
    let mut world = World::new(2, false);
    world.volumes[1].is_used = true;
    let waiting = phases(&mut world, 20);
    assert_eq!(waiting, [Phase::Pending, Phase::Waiting]);
    let message = |world: &World| {
        let status = world.object.clone().unwrap().status.unwrap();
        status.message
    };
    assert_eq!(message(&world), "claim claim-1 is in use by pods pod");
    world.seconds = 101;
    let ended = phases(&mut world, 20);
    assert_eq!(ended, [Phase::Aborting, Phase::Failed]);
    let expected = "it did not begin to switch within 100s: claim claim-1 is in use by pods pod";
    assert_eq!(message(&world), expected);
    // It never begins again.
    world.volumes[1].is_used = false;
    assert_eq!(phases(&mut world, 20), [Phase::Failed]);
    assert!(world.volumes.iter().all(|it| it.content == Content::Own));
}

#[test]
fn what_is_not_prepared_in_time_is_undone_and_names_the_reason() {
    for (is_away, why) in [
        (true, "the volume of claim claim-1: it does not answer"),
        (
            false,
            "it has no complete new image of claims claim-0, claim-1",
        ),
    ] {
        let mut world = World::new(2, false);
        while world.phase() != Some(Phase::Preparing) {
            let seen = world.observe().unwrap();
            world.act(&seen, false);
        }
        world.volumes[1].is_away = is_away;
        world.seconds = 101;
        assert_eq!(phases(&mut world, 3).first(), Some(&Phase::Aborting));
        let message = world.object.clone().unwrap().status.unwrap().message;
        assert_eq!(
            message,
            format!("it did not begin to switch within 100s: {why}")
        );
        world.volumes[1].is_away = false;
        assert_eq!(phases(&mut world, 20).last(), Some(&Phase::Failed));
        assert!(!world.is_fenced());
        assert!(world.volumes.iter().all(|it| it.content == Content::Own));
    }
}

#[test]
fn after_the_decision_to_switch_a_revert_has_no_deadline_and_is_not_undone() {
    let mut world = World::new(2, false);
    while world.phase() != Some(Phase::Switching) {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    world.seconds = 10_000;
    while !world.volumes[0].seen.is_switched {
        let seen = world.observe().unwrap();
        world.act(&seen, false);
    }
    let seen = world.observe().unwrap();
    world.write(&seen, |object| {
        object.metadata.deletion_timestamp = Some(Time(seen.now));
    });
    world.volumes[1].is_away = true;
    phases(&mut world, 20);
    assert_eq!(world.phase(), Some(Phase::Switching));
    assert!(world.is_fenced(), "until all have switched");
    world.volumes[1].is_away = false;
    phases(&mut world, 20);
    assert!(world.object.is_none() && !world.is_fenced());
    let is_new = |it: &Volume| it.content == Content::Snapshot;
    assert!(world.volumes.iter().all(is_new));
}
