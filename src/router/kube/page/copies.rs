//! The copies that run, from the status of Pool objects: parts of other work, or work by themselves.

use std::collections::BTreeMap;

use ::kube::ResourceExt;
use k8s_openapi::jiff::Timestamp;

use super::count;
use crate::router::kube::persistent_volumes::Volumes;
use crate::router::kube::pools::object::{Health, Pool};
use crate::router::kube::pools::running_copies::PoolCopy;
use crate::telemetry::page::world::Work;

/// A volume that other work copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// The ID of the volume that is filled.
    pub(super) volume: String,
    /// Bytes that are still to be copied if no copy runs.
    pub(super) waiting_bytes: u64,
    /// Bytes that have been copied if no copy runs.
    pub(super) done_bytes: u64,
}

/// The copies that are not shown yet.
pub(super) struct Copies<'a>(BTreeMap<&'a str, Vec<RunningCopy<'a>>>);

/// A copy, and where it runs.
struct RunningCopy<'a> {
    copy: &'a PoolCopy,
    pool: &'a Pool,
    reported: Timestamp,
}

impl<'a> Copies<'a> {
    /// Those of all pools that are not gone.
    pub(super) fn of(pools: &'a [Pool]) -> Copies<'a> {
        let mut found = BTreeMap::<&str, Vec<RunningCopy<'_>>>::new();
        for pool in pools {
            let status = pool.status.as_ref().filter(|status| {
                let health = status.health;
                !matches!(health, Health::Lost | Health::Forgotten)
            });
            let Some(copies) = status.and_then(|status| status.copies.as_ref()) else {
                continue;
            };
            for copy in &copies.running {
                found.entry(&copy.id).or_default().push(RunningCopy {
                    copy,
                    pool,
                    reported: copies.reported_at.0,
                });
            }
        }
        Copies(found)
    }

    /// Adds the copies of these volumes to the work that they are parts of. Without a copy that runs, the
    /// work keeps the numbers of its object.
    pub(super) fn add_to(&mut self, work: &mut Work, parts: &[Part]) {
        let (mut running, mut others) = (Vec::new(), Vec::new());
        for part in parts {
            match self.0.remove(part.volume.as_str()) {
                Some(copies) => running.extend(copies),
                None => others.push(part),
            }
        }
        if running.is_empty() {
            return;
        }
        let mut sum = Work::default();
        for one in &running {
            one.add_numbers(&mut sum);
        }
        for part in others {
            sum.done_before = sum.done_before.saturating_add(part.done_bytes);
            sum.done_bytes = sum.done_bytes.saturating_add(part.done_bytes);
            let all = part.done_bytes.saturating_add(part.waiting_bytes);
            sum.total_bytes = sum.total_bytes.saturating_add(all);
        }
        work.done_bytes = sum.done_bytes;
        work.done_before = sum.done_before;
        // Of a copy that has not opened its source yet, the total is not known.
        let are_known = running.iter().all(|one| one.copy.bytes_total.is_some());
        work.total_bytes = if are_known { sum.total_bytes } else { 0 };
        work.copying_since = sum.copying_since;
        work.reported = sum.reported;
    }

    /// Those that are no part of other work.
    pub(super) fn others(self, volumes: &Volumes) -> Vec<Work> {
        let all = self.0.into_values().flatten();
        all.map(|one| one.work(volumes)).collect()
    }
}

impl RunningCopy<'_> {
    fn add_numbers(&self, sum: &mut Work) {
        let copy = self.copy;
        let total = count(copy.bytes_total.unwrap_or(0));
        sum.done_bytes = sum.done_bytes.saturating_add(count(copy.bytes_done));
        sum.done_before = sum.done_before.saturating_add(count(copy.bytes_before));
        sum.total_bytes = sum.total_bytes.saturating_add(total);
        let since = sum.copying_since.into_iter().chain([copy.since.0]);
        sum.copying_since = since.min();
        sum.reported = sum.reported.into_iter().chain([self.reported]).min();
    }

    fn work(&self, volumes: &Volumes) -> Work {
        let copy = self.copy;
        // A new volume has no PersistentVolume yet, and then only its agent knows the claim.
        let claim = volumes.claim_of(&copy.id).or_else(|| copy.claim.clone());
        let pool = self.pool.name_any();
        let mut work = Work {
            resource: "pools",
            is_copy: true,
            what: what(copy, claim.as_deref()),
            phase: "Copying".into(),
            since: Some(copy.since.0),
            pools: vec![pool.clone()],
            name: pool,
            ..Work::default()
        };
        self.add_numbers(&mut work);
        work
    }
}

/// What a copy does, with the claim if that is known.
fn what(copy: &PoolCopy, claim: Option<&str>) -> String {
    let id = &copy.id;
    let of_snapshot = matches!(copy.kind.as_str(), "Export" | "Snapshot");
    let object = match claim {
        Some(claim) => format!("claim {claim}"),
        None if of_snapshot => format!("snapshot {id}"),
        None => format!("volume {id}"),
    };
    let words = match (copy.kind.as_str(), claim.is_some()) {
        ("Restore", _) => "restore of",
        ("Clone", _) => "clone for",
        ("Move", _) => "move of",
        ("Revert", _) => "revert of",
        ("Import", _) => "import of",
        ("Export", true) => "export of a snapshot of",
        ("Export", false) => "export of",
        ("Snapshot", true) => "full copy for a snapshot of",
        ("Snapshot", false) => "full copy for",
        ("Write", _) => "allocation of all blocks of",
        ("Growth", _) => "growth of",
        _ => "copy for",
    };
    match &copy.source_node {
        Some(node) => format!("{words} {object} from node {node}"),
        None => format!("{words} {object}"),
    }
}

#[cfg(test)]
mod tests {
    use ::kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::*;

    const POOL: &str = "11111111-2222-4333-8444-000000000001";
    const OTHER: &str = "11111111-2222-4333-8444-000000000002";

    fn time(minute: u32) -> Option<Timestamp> {
        Some(at(minute).parse().unwrap())
    }

    fn at(minute: u32) -> String {
        format!("2026-01-02T03:{minute:02}:00Z")
    }

    fn id(n: u32) -> String {
        format!("{POOL}.11111111-2222-4333-8444-{n:012}")
    }

    fn copy(n: u32, kind: &str) -> Value {
        json!({"kind": kind, "id": id(n), "since": at(n), "bytesDone": 5, "bytesTotal": 9,
            "bytesBefore": 2})
    }

    fn pool(name: &str, copies: &[Value]) -> Pool {
        let copies = json!({"reportedAt": at(30), "running": copies});
        let status = json!({"node": "node-1", "health": "Healthy", "copies": copies});
        let pool = json!({"metadata": {"name": name}, "status": status});
        serde_json::from_value(pool).unwrap()
    }

    /// The volume with the ID 1 is that of a claim.
    fn volumes() -> Volumes {
        let volumes = Volumes::new("d", "key");
        let volume = json!({"metadata": {"name": "pv"}, "spec": {
            "csi": {"driver": "d", "volumeHandle": id(1)}, "capacity": {"storage": "7"},
            "claimRef": {"namespace": "shop", "name": "data"}}});
        volumes.take(Event::Apply(serde_json::from_value(volume).unwrap()));
        volumes
    }

    #[test]
    fn a_copy_that_is_no_part_of_other_work_is_a_line_of_its_own() {
        let mut restore = copy(2, "Restore");
        restore["claim"] = json!("shop/new");
        restore["sourceNode"] = json!("node-2");
        let pools = [pool(POOL, &[copy(1, "Growth"), restore, copy(3, "Export")])];
        let found = Copies::of(&pools).others(&volumes());
        let what: Vec<_> = found.iter().map(|work| work.what.as_str()).collect();
        let export = format!("export of snapshot {}", id(3));
        let expected = [
            "growth of claim shop/data",
            "restore of claim shop/new from node node-2",
            &export,
        ];
        assert_eq!(what, expected);
        let expected = Work {
            resource: "pools",
            is_copy: true,
            name: POOL.into(),
            what: "growth of claim shop/data".into(),
            phase: "Copying".into(),
            since: time(1),
            done_bytes: 5,
            total_bytes: 9,
            copying_since: time(1),
            done_before: 2,
            reported: time(30),
            pools: vec![POOL.into()],
            ..Work::default()
        };
        assert_eq!(found[0], expected);
    }

    /// The claim of the PersistentVolume counts, whatever the agent reports.
    #[test]
    fn every_kind_is_named() {
        let mut names = Vec::new();
        let kinds = [
            "Restore", "Clone", "Move", "Revert", "Import", "Export", "Snapshot", "Write",
            "Growth", "Copy", "Later",
        ];
        for kind in kinds {
            let mut known = copy(1, kind);
            known["claim"] = json!("bank/secret");
            let pools = [pool(POOL, &[known, copy(2, kind)])];
            let found = Copies::of(&pools).others(&volumes());
            names.extend(found.iter().map(|work| work.what.replace(&id(2), "ID")));
        }
        insta::assert_snapshot!(names.join("\n"));
    }

    #[test]
    fn the_copies_of_work_are_added_to_it_with_what_waits_and_what_is_done() {
        let pools = [
            pool(POOL, &[copy(1, "Revert"), copy(4, "Revert")]),
            pool(OTHER, &[copy(9, "Restore")]),
        ];
        let mut copies = Copies::of(&pools);
        let mut work = Work {
            done_bytes: 99,
            ..Work::default()
        };
        let part = |n: u32, waiting_bytes: u64, done_bytes: u64| Part {
            volume: id(n),
            waiting_bytes,
            done_bytes,
        };
        let parts = [part(1, 9, 0), part(4, 9, 0), part(5, 9, 0), part(6, 0, 7)];
        copies.add_to(&mut work, &parts);
        assert_eq!((work.done_bytes, work.done_before), (2 * 5 + 7, 2 * 2 + 7));
        assert_eq!(work.total_bytes, 2 * 9 + 9 + 7);
        assert_eq!((work.copying_since, work.reported), (time(1), time(30)));
        assert_eq!(
            copies.others(&volumes()).len(),
            1,
            "they have no other line"
        );
    }

    #[test]
    fn work_without_a_copy_keeps_its_numbers_and_an_unknown_total_is_none() {
        let pools = [pool(POOL, &[copy(1, "Move")])];
        let mut copies = Copies::of(&pools);
        let of_object = Work {
            done_bytes: 3,
            total_bytes: 4,
            copying_since: time(7),
            ..Work::default()
        };
        let part = |n: u32| Part {
            volume: id(n),
            ..Part::default()
        };
        let mut work = of_object.clone();
        copies.add_to(&mut work, &[part(2)]);
        assert_eq!(work, of_object);

        let mut unknown = copy(1, "Move");
        unknown.as_object_mut().unwrap().remove("bytesTotal");
        let pools = [pool(POOL, &[unknown])];
        let mut work = of_object.clone();
        Copies::of(&pools).add_to(&mut work, &[part(1)]);
        assert_eq!((work.done_bytes, work.total_bytes), (5, 0));
    }

    #[test]
    fn a_pool_that_is_gone_or_has_no_copies_has_none() {
        let of = |health: &str| {
            let mut pool = pool(POOL, &[copy(1, "Move")]);
            let status = pool.status.as_mut().unwrap();
            status.health = serde_json::from_value(json!(health)).unwrap();
            Copies::of(&[pool]).others(&volumes()).len()
        };
        assert_eq!(of("Healthy"), 1);
        assert_eq!(of("Unreachable"), 1, "outdated, with its age");
        assert_eq!((of("Lost"), of("Forgotten")), (0, 0));
        let without: Pool = serde_json::from_value(json!({"metadata": {"name": POOL}})).unwrap();
        assert_eq!(Copies::of(&[without]).others(&volumes()).len(), 0);
    }

    /// An agent of a compromised node can report any numbers.
    #[test]
    fn hostile_numbers_do_not_overflow() {
        let most = |n: u32| {
            json!({"kind": "Move", "id": id(n), "since": at(1), "bytesDone": i64::MAX,
                "bytesTotal": i64::MAX, "bytesBefore": i64::MIN})
        };
        let pools = [pool(POOL, &[most(1), most(2), most(3)])];
        let parts = [1, 2, 3].map(|n| Part {
            volume: id(n),
            ..Part::default()
        });
        let mut work = Work::default();
        Copies::of(&pools).add_to(&mut work, &parts);
        assert_eq!((work.done_before, work.total_bytes), (0, u64::MAX));
    }
}
