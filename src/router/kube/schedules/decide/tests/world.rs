//! A cluster with one schedule. The test says where routers crash, and finishes the snapshots.

use std::collections::{BTreeMap, BTreeSet};

use ::kube::api::DynamicObject;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

use super::super::show::newest_good;
use super::*;
use crate::router::kube::schedules::names::Names;
use crate::router::kube::schedules::sets::{self, SCHEDULE_UID};

pub(super) const CLAIMS: [&str; 2] = ["a", "b"];
const UID: &str = "0a1b2c3d-1111-4222-8333-444444444444";

/// Where a router crashes in its first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crash {
    Before,
    /// After the first object of a slot.
    Within,
    BeforeStatus,
    Never,
}

pub(super) struct World {
    pub(super) schedule: SnapshotSchedule,
    pub(super) now: Timestamp,
    pub(super) skew: bool,
    pub(super) has_groups: bool,
    /// Members, levels and uses cannot be read.
    pub(super) is_unreadable: bool,
    pub(super) class: Option<Class>,
    pub(super) objects: BTreeMap<String, Value>,
    pub(super) levels: BTreeMap<String, Option<Level>>,
    pub(super) used: BTreeSet<String>,
    /// The volumes of sets that do not have the one that is named like the claim.
    pub(super) volumes: BTreeMap<String, String>,
    /// What is known of the CronJob that checks restores.
    pub(super) check: Option<Found>,
    pub(super) created: Vec<String>,
    pub(super) deleted: Vec<String>,
    /// How often the status was written.
    pub(super) writes: u32,
}

pub(super) fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// The message of a condition.
pub(super) fn message(status: &ScheduleStatus, type_: &str) -> String {
    let found = status.conditions.iter().find(|one| one.type_ == type_);
    found.map(|one| one.message.clone()).unwrap_or_default()
}

/// The status and the reason of a condition.
pub(super) fn condition<'a>(status: &'a ScheduleStatus, type_: &str) -> (&'a str, &'a str) {
    let found = status.conditions.iter().find(|one| one.type_ == type_);
    found.map_or(("", ""), |one| (&one.status, &one.reason))
}

pub(super) fn condition_of(type_: &str, status: &str, reason: &str) -> Condition {
    let now = at("2026-11-22T00:00:00Z");
    super::super::show::condition(type_, status, reason, String::new(), now)
}

impl World {
    pub(super) fn new(spec: Value) -> World {
        let schedule = json!({
            "metadata": {"name": "pg", "namespace": "shop", "uid": UID, "generation": 1,
                "creationTimestamp": "2026-11-22T00:10:00Z"},
            "spec": spec,
        });
        World {
            schedule: serde_json::from_value(schedule).unwrap(),
            now: at("2026-11-22T00:20:00Z"),
            skew: false,
            has_groups: false,
            is_unreadable: false,
            class: Some(Class {
                is_ours: true,
                deletes: true,
                level: Ok(Level::Filesystem),
            }),
            objects: BTreeMap::new(),
            levels: BTreeMap::new(),
            used: BTreeSet::new(),
            volumes: BTreeMap::new(),
            check: None,
            created: Vec::new(),
            deleted: Vec::new(),
            writes: 0,
        }
    }

    pub(super) fn uid(&self) -> &str {
        UID
    }

    pub(super) fn class_mut(&mut self) -> &mut Class {
        self.class.as_mut().unwrap()
    }

    pub(super) fn status(&self) -> ScheduleStatus {
        self.schedule.status.clone().unwrap_or_default()
    }

    /// Hours and minutes of the slots that the status lists as skipped.
    pub(super) fn skipped(&self) -> Vec<String> {
        let slots = self.status().skipped_slots.into_iter();
        slots
            .map(|slot| slot.0.to_string()[11..16].into())
            .collect()
    }

    fn insert(&mut self, mut object: Value, ready: bool, created: Timestamp) -> String {
        let name = object["metadata"]["name"].as_str().unwrap().to_string();
        let metadata = &mut object["metadata"];
        metadata["uid"] = json!(format!("uid of {name}"));
        metadata["resourceVersion"] = json!("1");
        metadata["creationTimestamp"] = json!(created.to_string());
        object["status"] = json!({
            "boundVolumeSnapshotContentName": format!("content of {name}"),
            "boundVolumeGroupSnapshotContentName": format!("content of {name}"), "readyToUse": ready,
        });
        self.objects.insert(name.clone(), object);
        name
    }

    pub(super) fn add_good(&mut self, claim: &str, slot: &str) {
        let names = Names::of(&self.schedule).unwrap();
        let object = json!({
            "metadata": {"name": names.name(at(slot), claim), "namespace": "shop",
                "labels": {SCHEDULE_UID: UID}},
            "spec": {"source": {"persistentVolumeClaimName": claim}},
        });
        let name = self.insert(object, true, at(slot));
        self.levels.insert(name, Some(Level::Filesystem));
    }

    /// A person changes the spec.
    pub(super) fn change(&mut self, fields: &Value) {
        let mut spec = serde_json::to_value(&self.schedule.spec).unwrap();
        for (field, value) in fields.as_object().unwrap() {
            spec[field] = value.clone();
        }
        self.schedule.spec = serde_json::from_value(spec).unwrap();
        let generation = self.schedule.metadata.generation.as_mut().unwrap();
        *generation += 1;
    }

    /// All snapshots become ready.
    pub(super) fn finish(&mut self, level: Option<Level>) {
        for (name, object) in &mut self.objects {
            if object["status"]["readyToUse"] == json!(false) {
                object["status"]["readyToUse"] = json!(true);
                self.levels.insert(name.clone(), level);
            }
        }
    }

    pub(super) fn fail(&mut self, name: &str, why: &str) {
        self.objects.get_mut(name).unwrap()["status"]["error"] = json!({"message": why});
    }

    pub(super) fn leave(&mut self, name: &str) {
        let object = self.objects.get_mut(name).unwrap();
        object["metadata"]["deletionTimestamp"] = json!("2026-11-22T04:00:00Z");
    }

    /// What a router reads, as [`super::super::super::observe`] does.
    pub(super) fn seen(&self) -> Seen {
        let mut seen = Seen {
            object: self.schedule.clone(),
            now: self.now,
            skew: self.skew.then(|| "they differ".into()),
            has_groups: self.has_groups,
            class: self.class.clone(),
            sets: BTreeMap::new(),
            others: Vec::new(),
            unread: None,
            is_complete: false,
            check: self.check.clone(),
        };
        let names = Names::of(&self.schedule).unwrap();
        for object in self.objects.values() {
            let object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
            let is_group = self.schedule.spec.selector.is_some();
            if let Some(set) = Set::read(&object, &names, is_group) {
                seen.sets.entry(set.claim.clone()).or_default().push(set);
            }
            seen.others.extend(Set::read(&object, &names, !is_group));
        }
        let level = |set: &mut Set| {
            let level = self.levels.get(&set.name).copied().flatten();
            let class = self
                .class
                .as_ref()
                .and_then(|class| class.level.clone().ok());
            set.set_level(level, class.unwrap_or(Level::Filesystem));
        };
        for sets in seen.sets.values_mut() {
            let newest = newest_good(sets, self.now).map(|set| set.name.clone());
            sets.iter_mut()
                .filter(|set| Some(&set.name) == newest.as_ref())
                .for_each(level);
        }
        if self.is_unreadable && decide(&seen).needs_more {
            seen.unread = Some("claims cannot be listed: forbidden".into());
        } else if decide(&seen).needs_more {
            seen.is_complete = true;
            for set in seen.sets.values_mut().flatten() {
                level(set);
                let volume = self.volumes.get(&set.name).unwrap_or(&set.claim);
                set.volumes = match set.claim.as_str() {
                    "" => CLAIMS.map(String::from).into(),
                    _ => [volume.clone()].into(),
                };
                set.used = self.used.contains(&set.name).then(|| "it is used".into());
            }
        }
        seen
    }

    /// One pass of a router. Returns whether something was done.
    pub(super) fn pass(&mut self, crash: Crash) -> bool {
        let seen = self.seen();
        let decision = decide(&seen);
        assert!(!decision.needs_more || !seen.is_complete);
        let is_idle = decision.step.is_none() && decision.status.is_shown_by(&self.status());
        if crash == Crash::Before || is_idle {
            return !is_idle;
        }
        self.step(&decision, crash);
        if crash != Crash::Never && decision.step.is_some() {
            return true;
        }
        self.schedule.status = Some(decision.status);
        self.writes += 1;
        true
    }

    fn step(&mut self, decision: &Decision, crash: Crash) {
        match &decision.step {
            None => {}
            Some(Step::Cut(slot)) => {
                let plan = Plan::of(&self.schedule).unwrap();
                for object in sets::objects(&self.schedule, &plan.names, &plan.what, *slot) {
                    let name = object["metadata"]["name"].as_str().unwrap();
                    if !self.objects.contains_key(name) {
                        self.created.push(name.into());
                        self.insert(object, false, self.now);
                    }
                    if crash == Crash::Within {
                        return;
                    }
                }
            }
            Some(Step::Delete(deletion)) => {
                let set = &deletion.set;
                self.deleted.push(set.name.clone());
                let object = self.objects.remove(&set.name).unwrap();
                assert_eq!(object["metadata"]["uid"], json!(set.uid));
                let newer = &self.objects[&deletion.newer.name];
                assert!(newer["metadata"]["deletionTimestamp"].is_null());
            }
        }
    }

    /// Passes until nothing is left to be done.
    pub(super) fn run(&mut self) {
        for _ in 0..50 {
            if !self.pass(Crash::Never) {
                return;
            }
        }
        panic!("it does not end: {:?}", decide(&self.seen()));
    }

    pub(super) fn wait(&mut self, minutes: i64) {
        self.now += SignedDuration::from_mins(minutes);
    }
}
