//! A cluster with one claim and its move: what a router sees of it, and what its steps do.

use ::kube::api::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::super::super::show::shown;
use super::super::*;
use crate::operation::MoveContentStatus;
use crate::router::kube::adopt::manifest::POLICY;
use crate::router::kube::adopt::manifest::tests::{KEY, volume};
use crate::router::kube::moves::fences;
use crate::router::kube::moves::object::{FINALIZER, MoveSpec, PreCopy, When};

pub(super) const UID: Uuid = Uuid::from_u128(7);
pub(super) const SOURCE: &str = "pool-a.source";
pub(super) const COPY: &str = "pool-b.copy";

/// A volume and what was written to it last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Data {
    pub(super) exists: bool,
    pub(super) fenced: bool,
    pub(super) lifted: bool,
    pub(super) content: u64,
}

/// A snapshot, or an incomplete copy of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Taken {
    pub(super) identity: u64,
    pub(super) content: u64,
    pub(super) is_whole: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) object: Option<VolumeMove>,
    pub(super) has_claim: bool,
    pub(super) live: Option<Manifest>,
    pub(super) noted: Option<Manifest>,
    pub(super) source: Data,
    pub(super) copy: Data,
    /// What the incomplete copy has.
    pub(super) filled: Option<Taken>,
    pub(super) snapshots: BTreeMap<Round, Taken>,
    /// Copies of parts of a volume that pods were using.
    pub(super) fills: u32,
    /// What the application has written last.
    pub(super) written: u64,
    pub(super) pod: Option<PodUse>,
    pub(super) is_cordoned: bool,
    pub(super) is_source_away: bool,
    pub(super) is_copy_away: bool,
    pub(super) is_target_lost: bool,
    pub(super) double: bool,
    /// The agent of the target refuses copies.
    pub(super) refuses: bool,
    /// The agent of the source refuses snapshots before the fence.
    pub(super) refuses_rounds: bool,
    /// Bytes that are written between two rounds.
    pub(super) changes: u64,
    /// The object was removed together with its finalizer.
    pub(super) was_removed: bool,
    /// A router has written something late that names no version: it may be left, and harms no data.
    pub(super) wrote_late: bool,
    pub(super) seconds: i64,
    pub(super) versions: u64,
}

pub(super) fn place(node: &str, handle: &str) -> Place {
    Place {
        node: node.into(),
        home: format!("home-of-{node}"),
        pool: "11111111-2222-4333-8444-555555555555".into(),
        pool_name: "default".into(),
        handle: handle.into(),
    }
}

impl World {
    pub(super) fn new(when: When) -> World {
        let object = VolumeMove {
            metadata: ObjectMeta {
                name: Some("move".into()),
                uid: Some(UID.to_string()),
                resource_version: Some("1".into()),
                generation: Some(1),
                ..ObjectMeta::default()
            },
            spec: MoveSpec {
                claim: "data".into(),
                when,
                keep_source: Some("60s".into()),
                ..MoveSpec::default()
            },
            ..VolumeMove::default()
        };
        World {
            object: Some(object),
            has_claim: true,
            live: Some(volume("pv", SOURCE, "home-of-a")),
            noted: None,
            source: Data {
                exists: true,
                ..Data::default()
            },
            copy: Data::default(),
            filled: None,
            snapshots: BTreeMap::new(),
            fills: 0,
            written: 0,
            pod: None,
            is_cordoned: false,
            is_source_away: false,
            is_copy_away: false,
            is_target_lost: false,
            double: false,
            refuses: false,
            refuses_rounds: false,
            changes: 0,
            was_removed: false,
            wrote_late: false,
            seconds: 1_800_000_000,
            versions: 10,
        }
    }

    pub(super) fn handle(&self) -> Option<&str> {
        self.live.as_ref().and_then(|live| live.text(HANDLE))
    }

    pub(super) fn named(&self) -> Option<Data> {
        match self.handle()? {
            SOURCE => Some(self.source),
            _ => Some(self.copy),
        }
    }

    /// Whether the pod has the volume mounted.
    pub(super) fn uses(&self) -> bool {
        self.pod.as_ref().is_some_and(|pod| pod.has_started)
    }

    pub(super) fn seen_snapshots(&self) -> BTreeMap<Round, MoveSnapshotStatus> {
        let snapshots = self.snapshots.iter().map(|(round, taken)| {
            let snapshot = MoveSnapshotStatus {
                id: format!("{round:?}"),
                is_ready: taken.is_whole,
                identity: taken.identity,
            };
            (*round, snapshot)
        });
        let snapshots = snapshots.filter(|_| !self.is_source_away);
        snapshots.collect()
    }

    /// The copy, if it is incomplete with what it has.
    pub(super) fn seen_copy(&self, whole: VolumeMoveStatus) -> VolumeMoveStatus {
        let mut copy = whole;
        if let Some(filled) = self.filled {
            copy.state = MovingState::Filling;
            copy.content = Some(MoveContentStatus {
                identity: filled.identity,
                is_whole: filled.is_whole,
            });
        }
        copy
    }

    pub(super) fn seen(&self) -> Option<Observed> {
        let object = self.object.clone()?;
        let moved = |data: Data, user: bool| VolumeMoveStatus {
            state: match data.exists {
                true => MovingState::Ready,
                false => MovingState::Absent,
            },
            fenced: data.fenced.then_some(UID),
            lifted: data.lifted.then_some(UID),
            user: user.then(|| "it is mounted".to_string()),
            ..VolumeMoveStatus::default()
        };
        let is_at_source = self.handle() == Some(SOURCE);
        let source = moved(self.source, self.uses() && is_at_source);
        let copy = self.seen_copy(moved(self.copy, false));
        let away = |is_away, moved| match is_away {
            true => Err("it is down".to_string()),
            false => Ok(moved),
        };
        let begun = object
            .status
            .as_ref()
            .is_some_and(|status| status.from.is_some());
        let refusal = Refusal {
            reason: "NoClaim",
            message: "its claim does not exist".into(),
        };
        let proposal = MoveStatus {
            phase: Phase::Copying,
            volume: Some("pv".into()),
            volume_uid: Some("uid-1".into()),
            claim_uid: Some("claim-1".into()),
            from: Some(place("a", SOURCE)),
            to: Some(place("b", COPY)),
            ..MoveStatus::default()
        };
        let can_begin = self.has_claim && is_at_source;
        Some(Observed {
            object,
            now: Timestamp::from_second(self.seconds).unwrap(),
            key: KEY.into(),
            proposal: (!begun).then(|| can_begin.then_some(proposal).ok_or(refusal)),
            claim: match self.has_claim {
                true => ClaimState::Here {
                    is_bound: self.live.is_some(),
                },
                false => ClaimState::Gone,
            },
            live: self.live.clone(),
            noted: self
                .noted
                .clone()
                .filter(|noted| noted.uid() == Some("uid-1")),
            double: self.double.then(|| "other".into()),
            foreign_volume: None,
            foreign_source: None,
            names_copy: (self.handle() == Some(COPY)).then(|| "pv".into()),
            source: away(self.is_source_away, source),
            copy: match self.is_target_lost {
                true => Ok(VolumeMoveStatus::default()),
                false => away(self.is_copy_away, copy),
            },
            snapshots: self.seen_snapshots(),
            target_problem: self.is_copy_away.then(|| "it is down".into()),
            is_target_lost: self.is_target_lost,
            pods: self.pod.iter().cloned().collect(),
            is_cordoned: self.is_cordoned,
            attached: None,
        })
    }

    pub(super) fn change(&mut self, change: impl FnOnce(&mut Manifest)) {
        self.versions += 1;
        let Some(live) = self.live.as_mut() else {
            return;
        };
        change(live);
        live.0.metadata.resource_version = Some(self.versions.to_string());
    }

    pub(super) fn write(&mut self, status: &MoveStatus) {
        self.versions += 1;
        let version = self.versions.to_string();
        if let Some(object) = &mut self.object {
            object.status = Some(status.clone());
            object.metadata.resource_version = Some(version);
        }
    }

    /// What the router decides now; `None` if nothing is to be done.
    pub(super) fn decided(&self) -> Option<(Observed, Decision)> {
        let seen = self.seen()?;
        let decision = decide(&seen);
        let before = seen.object.status.clone().unwrap_or_default();
        let is_new = decision.step.is_some() || shown(&seen, &decision) != before;
        is_new.then_some((seen, decision))
    }

    /// Does what a router has decided from what it had seen, which may be old.
    pub(super) fn execute(&mut self, (seen, decision): &(Observed, Decision)) {
        let version = |object: &VolumeMove| object.metadata.resource_version.clone();
        let is_same = self.object.as_ref().map(version) == Some(version(&seen.object));
        let before = seen.object.status.clone().unwrap_or_default();
        let status = shown(seen, decision);
        if status != before {
            if is_same {
                self.write(&status);
            }
            return;
        }
        let Some(step) = &decision.step else { return };
        match step {
            Step::Begin(begun) if is_same => self.write(begun),
            Step::BeginRound(round) if is_same => self.write(&MoveStatus {
                pre_copy: PreCopy {
                    round: *round,
                    begun_at: Some(Time(seen.now)),
                    ..PreCopy::default()
                },
                ..status
            }),
            Step::MarkFenced if is_same => self.write(&MoveStatus {
                fenced_at: Some(Time(seen.now)),
                ..status
            }),
            Step::MarkSwitched if is_same => self.write(&MoveStatus {
                switched_at: Some(Time(seen.now)),
                ..status
            }),
            Step::AddFinalizer | Step::RemoveFinalizer if is_same => self.finalizer(step),
            Step::Begin(_)
            | Step::BeginRound(_)
            | Step::MarkFenced
            | Step::MarkSwitched
            | Step::AddFinalizer
            | Step::RemoveFinalizer => {}
            Step::Evict(pod) | Step::DeletePod(pod) => {
                self.pod = self.pod.take().filter(|now| now.uid != pod.uid);
            }
            Step::Pv(step) => self.exchange(*step, seen),
            Step::Copy if self.refuses && is_same => self.write(&MoveStatus {
                phase: Phase::Aborting,
                message: "no room".into(),
                ..status
            }),
            Step::Copy if self.refuses => {}
            Step::Fill(_) | Step::Snapshot(_) => self.round(step, is_same, status),
            Step::DeleteSource => {
                let is_ready = |copy: &VolumeMoveStatus| copy.state == MovingState::Ready;
                let has_copy = seen.copy.as_ref().is_ok_and(is_ready);
                assert!(has_copy || seen.live.is_none(), "the last copy: {self:?}");
                self.order(step);
            }
            step => self.order(step),
        }
    }

    /// A step of a round, and what the router writes about it.
    pub(super) fn round(&mut self, step: &Step, is_same: bool, status: MoveStatus) {
        let mut pre_copy = status.pre_copy.clone();
        match step {
            Step::Fill(_) if self.refuses => {
                self.order(&Step::DeleteCopy);
                pre_copy.problem = Some("no room".into());
            }
            Step::Snapshot(_) if self.refuses_rounds => pre_copy.problem = Some("no space".into()),
            Step::Snapshot(_) => {
                self.order(step);
                pre_copy.bytes = Some(self.changes);
            }
            step => return self.order(step),
        }
        if is_same {
            self.write(&MoveStatus { pre_copy, ..status });
        }
    }

    pub(super) fn finalizer(&mut self, step: &Step) {
        self.versions += 1;
        let version = self.versions.to_string();
        let Some(object) = &mut self.object else {
            return;
        };
        object.metadata.resource_version = Some(version);
        object.metadata.finalizers = match step {
            Step::AddFinalizer => Some(vec![FINALIZER.into()]),
            _ => None,
        };
        if object.is_leaving() && !object.has_finalizer() {
            self.object = None;
        }
    }

    /// What an agent does, which checks for itself what it must.
    pub(super) fn order(&mut self, step: &Step) {
        match step {
            Step::Fence
            | Step::LiftFence
            | Step::Snapshot(_)
            | Step::DeleteSnapshot(_)
            | Step::DeleteSource
                if self.is_source_away => {}
            Step::Copy | Step::Fill(_) if self.is_source_away || self.is_copy_away => {}
            Step::DeleteCopy if self.is_copy_away => {}
            Step::Fence => {
                let used = self.uses() && self.handle() == Some(SOURCE);
                if self.source.exists && !used && !self.source.lifted {
                    self.source.fenced = true;
                }
            }
            Step::LiftFence => (self.source.fenced, self.source.lifted) = (false, true),
            Step::Copy => {
                if let Some(taken) = self.taken(None).filter(|_| !self.copy.exists) {
                    self.filled = None;
                    self.copy = Data {
                        exists: true,
                        content: taken.content,
                        ..Data::default()
                    };
                }
            }
            Step::Snapshot(round) => drop(self.taken(Some(*round))),
            Step::Fill(round) => {
                if let Some(taken) = self.taken(Some(*round)).filter(|_| !self.copy.exists) {
                    // The first call only begins.
                    let begun = self.filled.map(|filled| filled.identity);
                    let is_whole = begun == Some(taken.identity);
                    self.filled = Some(Taken { is_whole, ..taken });
                    self.fills += u32::from(!self.source.fenced);
                }
            }
            Step::DeleteSnapshot(round) => drop(self.snapshots.remove(round)),
            Step::DeleteCopy => (self.copy, self.filled) = (Data::default(), None),
            Step::DeleteSource => {
                if self.source.fenced {
                    self.source = Data::default();
                }
            }
            other => panic!("{other:?} is not for agents"),
        }
    }

    /// A snapshot of the source, which is taken unless it exists.
    pub(super) fn taken(&mut self, round: Round) -> Option<Taken> {
        let may = self.source.exists && !self.source.lifted;
        let may = may && (round.is_some() || self.source.fenced);
        self.versions += 1;
        let new = Taken {
            identity: self.versions,
            content: self.source.content,
            is_whole: true,
        };
        match may {
            true => Some(*self.snapshots.entry(round).or_insert(new)),
            false => self.snapshots.get(&round).copied(),
        }
    }

    /// The API server refuses what names another version.
    pub(super) fn exchange(&mut self, step: PvStep, seen: &Observed) {
        let version = |one: &Option<Manifest>| {
            one.as_ref()
                .map(|one| (one.uid().map(String::from), one.version().map(String::from)))
        };
        let is_same = version(&self.live) == version(&seen.live);
        match step {
            PvStep::Strike => self.noted = None,
            PvStep::Note => self.noted = seen.live.as_ref().map(Manifest::plain),
            PvStep::Make if self.live.is_none() => {
                let goal = Goal {
                    key: KEY,
                    home: "home-of-b",
                    handle: Some(COPY),
                };
                self.live = seen.noted.as_ref().map(|noted| noted.at(goal));
                self.versions += 1;
                let uid = format!("uid-{}", self.versions);
                let phase = if self.has_claim { "Bound" } else { "Released" };
                self.change(|live| {
                    live.0.metadata.uid = Some(uid);
                    live.0.data["status"] = json!({ "phase": phase });
                });
            }
            _ if !is_same => {}
            PvStep::Retain => self.change(|live| {
                let before = live.policy().to_string();
                let annotations = live.0.metadata.annotations.get_or_insert_default();
                annotations.insert(POLICY.into(), before);
                live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
            }),
            PvStep::Restore => self.change(|live| {
                let before = live.policy_before().map(String::from);
                live.0.metadata.annotations.as_mut().unwrap().remove(POLICY);
                live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!(before);
            }),
            PvStep::Delete => self.change(|live| {
                let now = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
                live.0.metadata.deletion_timestamp = Some(now);
            }),
            PvStep::Release => self.live = None,
            PvStep::Make => {}
        }
    }

    /// What the controller of fences does.
    pub(super) fn lift_without_move(&mut self) {
        let seen = fences::Seen {
            has_move: self.object.is_some(),
            live: self.live.clone().filter(|_| self.handle() == Some(SOURCE)),
            other: self.double.then(|| "other".into()),
            is_stored: self.noted.is_some(),
        };
        if self.source.fenced && !self.is_source_away && fences::decide(&seen) == Next::Step(()) {
            self.snapshots.clear();
            self.order(&Step::LiftFence);
        }
    }

    /// What Kubernetes and the provisioner do by themselves.
    pub(super) fn others(&mut self) {
        if self.has_claim || self.uses() {
            return;
        }
        self.change(|live| live.0.data["status"] = json!({ "phase": "Released" }));
        let Some(live) = &self.live else { return };
        if live.policy() != "Delete" || live.is_leaving() {
            return;
        }
        match live.text(HANDLE) {
            Some(SOURCE) if self.source.fenced || self.is_source_away => {}
            Some(SOURCE) => (self.source, self.live) = (Data::default(), None),
            Some(_) if self.is_copy_away => {}
            Some(_) => (self.copy, self.live) = (Data::default(), None),
            None => {}
        }
    }

    /// A pod of the claim is created and placed where its PersistentVolume is.
    pub(super) fn start_pod(&mut self) {
        let Some(handle) = self.handle() else { return };
        let node = if handle == SOURCE { "a" } else { "b" };
        if self.pod.is_some() || !self.has_claim {
            return;
        }
        self.versions += 1;
        let is_kept_off = node == "a" && self.is_cordoned;
        self.pod = Some(PodUse {
            name: "db-0".into(),
            uid: self.versions.to_string(),
            node: (!is_kept_off).then(|| node.into()),
            has_started: false,
        });
    }

    /// The kubelet mounts the volume of a placed pod, unless it is fenced or somewhere else; then the
    /// application writes.
    pub(super) fn run_pod(&mut self) {
        let handle = self.handle().map(String::from);
        let Some(pod) = &mut self.pod else { return };
        let node = match handle.as_deref() {
            Some(SOURCE) => "a",
            Some(_) => "b",
            None => return,
        };
        if pod.node.as_deref() != Some(node) {
            return;
        }
        let data = if node == "a" {
            &mut self.source
        } else {
            &mut self.copy
        };
        if !pod.has_started && (!data.exists || data.fenced) {
            return;
        }
        pod.has_started = true;
        assert!(data.exists && !data.fenced, "{node} is used");
        assert_eq!(data.content, self.written, "it has lost what was written");
        self.written += 1;
        data.content = self.written;
        // Only one copy may be written: nothing can start to use the other one.
        let other = if node == "a" { None } else { Some(self.source) };
        assert!(other.is_none_or(|other| !other.exists || other.fenced));
    }

    pub(super) fn check(&self) {
        if !self.has_claim || self.is_target_lost {
            return;
        }
        let data = match (&self.live, &self.noted) {
            (Some(_), _) => self.named().unwrap(),
            (None, Some(_)) => self.copy,
            (None, None) => panic!("the PersistentVolume is lost"),
        };
        assert!(data.exists, "no copy: {self:?}");
        assert_eq!(data.content, self.written, "an old copy: {self:?}");
    }

    /// Everything is repaired, and the router goes on to the end.
    pub(super) fn end(&mut self) {
        (self.is_source_away, self.is_copy_away) = (false, false);
        (self.is_cordoned, self.double, self.refuses) = (true, false, false);
        self.refuses_rounds = false;
        for round in 0..400 {
            self.pod = None;
            self.seconds += 30;
            self.others();
            self.lift_without_move();
            self.check();
            if let Some(decided) = self.decided() {
                self.execute(&decided);
                continue;
            }
            if round > 300 {
                break;
            }
        }
        let status = self
            .object
            .as_ref()
            .and_then(|object| object.status.clone());
        if let Some(object) = &self.object {
            let phase = status.clone().unwrap_or_default().phase;
            let never_began = status.as_ref().is_none_or(|status| status.from.is_none());
            // It keeps the source, which is the only copy.
            let is_stuck = self.is_target_lost
                && self.source.exists
                && status
                    .as_ref()
                    .is_some_and(|status| status.switched_at.is_some());
            let may_stay = never_began || is_stuck;
            assert!(phase.is_final() || may_stay, "{phase:?}: {self:?}");
            assert!(!object.has_finalizer() || may_stay, "{self:?}");
            let message = status.map(|status| status.message).unwrap_or_default();
            let has_reason = phase != Phase::Aborted || never_began || !message.is_empty();
            assert!(has_reason, "no reason: {self:?}");
        }
        if self.was_removed {
            let live = self
                .live
                .as_ref()
                .filter(|live| live.policy_before().is_none());
            let is_certain = live.is_some() && self.noted.is_none();
            let is_kept_off = self.handle() == Some(SOURCE) && self.source.fenced;
            assert!(!is_certain || !is_kept_off, "{self:?}");
        }
        if self.is_target_lost || self.was_removed {
            return;
        }
        assert!(self.noted.is_none() || self.wrote_late, "{self:?}");
        assert!(self.snapshots.is_empty(), "{self:?}");
        assert_eq!(self.filled, None, "{self:?}");
        let left = [self.source, self.copy]
            .iter()
            .filter(|one| one.exists)
            .count();
        assert!(
            left == usize::from(self.has_claim) || self.wrote_late,
            "{self:?}"
        );
        if let Some(live) = self.live.as_ref().filter(|_| !self.wrote_late) {
            assert_eq!((live.policy(), live.policy_before()), ("Delete", None));
            assert!(!live.is_leaving() && !self.named().unwrap().fenced);
        }
    }
}
