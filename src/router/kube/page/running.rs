//! Moves, reverts and evacuations that have not ended, from their objects, with the copies of their
//! volumes; and all other copies.

use std::collections::BTreeMap;

use ::kube::ResourceExt;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::copies::{Copies, Part};
use crate::model::{PoolId, VolumeId};
use crate::router::kube::moves::object::{Phase, VolumeMove};
use crate::router::kube::persistent_volumes::Volumes;
use crate::router::kube::pools::evacuation::EVACUATES;
use crate::router::kube::pools::evacuation::remaining;
use crate::router::kube::pools::object::Pool;
use crate::router::kube::reverts::object::{MemberState, RevertPhase, VolumeRevert};
use crate::router::kube::{InCluster, moves};
use crate::telemetry::page::world::Work;

/// The work that runs in the cluster.
pub(super) fn work(cluster: &InCluster, pools: &[Pool]) -> Vec<Work> {
    let moves = cluster.moves();
    let evacuations = pools
        .iter()
        .filter_map(|pool| evacuation(pool, &moves, &cluster.volumes));
    let mut work: Vec<Work> = evacuations.collect();
    let mut copies = Copies::of(pools);
    work.extend(moves.values().filter_map(|moved| {
        let mut work = running_move(moved)?;
        copies.add_to(&mut work, &copied_by_move(moved));
        Some(work)
    }));
    work.extend(cluster.reverts().values().filter_map(|revert| {
        let mut work = running_revert(revert)?;
        copies.add_to(&mut work, &copied_by_revert(revert, &cluster.volumes));
        Some(work)
    }));
    work.extend(copies.others(&cluster.volumes));
    work
}

/// The volume that a move fills.
fn copied_by_move(moved: &VolumeMove) -> Vec<Part> {
    let to = moved.status.iter().filter_map(|status| status.to.as_ref());
    let parts = to.map(|to| Part {
        volume: to.handle.clone(),
        ..Part::default()
    });
    parts.collect()
}

/// The volumes of a revert whose new images are copied, or wait for that.
fn copied_by_revert(revert: &VolumeRevert, volumes: &Volumes) -> Vec<Part> {
    let members = revert.status.iter().flat_map(|status| &status.members);
    let parts = members.map(|member| {
        let bytes = volumes.bytes_of(&member.handle);
        let is_waiting = matches!(member.state, MemberState::Waiting | MemberState::Fenced);
        Part {
            volume: member.handle.clone(),
            waiting_bytes: if is_waiting { bytes } else { 0 },
            done_bytes: if is_waiting { 0 } else { bytes },
        }
    });
    parts.collect()
}

/// The bytes of moves, and when the first of them was created.
#[derive(Default)]
struct Sum {
    moved: u64,
    volumes: u64,
    done: u64,
    total: u64,
    since: Option<Timestamp>,
    is_copying: bool,
}

/// A pool that is being emptied.
fn evacuation(
    pool: &Pool,
    moves: &BTreeMap<String, VolumeMove>,
    volumes: &Volumes,
) -> Option<Work> {
    let status = pool.status.clone().unwrap_or_default();
    let left = status.evacuation.map(|evacuation| evacuation.left);
    if !pool.spec.evacuate || left == Some(0) {
        return None;
    }
    let id = pool.name_any();
    let mut conditions = status.conditions.into_iter();
    let condition = conditions.find(|one| one.type_ == remaining::EVACUATED);
    let begun = condition.as_ref().map(|one| one.last_transition_time.0);
    let sum = sum(&id, moves, volumes);
    let since = sum.since.into_iter().chain(begun).min();
    Some(Work {
        resource: "pools",
        what: format!("evacuation of pool {} of node {}", status.name, status.node),
        phase: left.map_or(String::new(), |left| format!("{left} left")),
        message: condition.map_or(String::new(), |one| one.message),
        since,
        volumes: Some((sum.moved, sum.volumes)),
        done_bytes: sum.done,
        total_bytes: sum.total,
        // While all of its moves wait, for pods to end or for a target, nothing has a rate.
        copying_since: sum.since.filter(|_| sum.is_copying),
        pools: vec![id.clone()],
        name: id,
        ..Work::default()
    })
}

/// What has been moved out of a pool by its evacuation, and what the claims have that are still in it.
fn sum(id: &str, moves: &BTreeMap<String, VolumeMove>, volumes: &Volumes) -> Sum {
    let mut sum = Sum::default();
    let here = match id.parse() {
        Ok(pool) => volumes.claimed_bytes(PoolId(pool)),
        Err(_) => Vec::new(),
    };
    for bytes in here {
        sum.volumes += 1;
        sum.total = sum.total.saturating_add(bytes);
    }
    for moved in moves.values() {
        let status = moved.status.clone().unwrap_or_default();
        let is_from = status.from.as_ref().is_some_and(|from| from.pool == id);
        let labels = moved.metadata.labels.as_ref();
        let is_its = labels
            .and_then(|all| all.get(EVACUATES))
            .map(String::as_str)
            == Some(id);
        if is_its {
            let created = moved.metadata.creation_timestamp.as_ref().map(|at| at.0);
            sum.since = sum.since.into_iter().chain(created).min();
        }
        if !is_from || matches!(status.phase, Phase::Aborted) {
            continue;
        }
        // Its PersistentVolume names the copy, which is in another pool.
        let has_left = status.switched_at.is_some();
        match (has_left, is_its || !status.phase.is_final()) {
            (true, true) => {
                sum.volumes += 1;
                sum.moved += u64::from(status.phase == Phase::Done);
                sum.total = sum.total.saturating_add(status.bytes_total);
                sum.done = sum.done.saturating_add(status.bytes_total);
            }
            // One of before.
            (true, false) => {}
            (false, _) => {
                let copies = matches!(status.phase, Phase::Copying | Phase::LastCopy);
                sum.is_copying |= copies && status.message.is_empty();
                let done = status.bytes_done.min(status.bytes_total);
                sum.done = sum.done.saturating_add(done);
            }
        }
    }
    sum.done = sum.done.min(sum.total);
    sum
}

fn running_move(moved: &VolumeMove) -> Option<Work> {
    let status = moved.status.clone().unwrap_or_default();
    if status.phase.is_final() {
        return None;
    }
    let to = status.to.as_ref().map(|to| to.node.as_str());
    // Later rounds copy differences, and the bytes of earlier ones count with theirs.
    let begun = match status.pre_copy.round {
        0 => status.fenced_at.filter(|_| status.phase == Phase::LastCopy),
        1 => {
            let begun = status.pre_copy.begun_at;
            begun.filter(|_| status.phase == Phase::Copying)
        }
        _ => None,
    };
    let places = [&status.from, &status.to].into_iter().flatten();
    Some(Work {
        resource: "volumemoves",
        namespace: moved.namespace().unwrap_or_default(),
        name: moved.name_any(),
        what: match to {
            Some(node) => format!("move of claim {} to node {node}", moved.claim()),
            None => format!("move of claim {}", moved.claim()),
        },
        phase: status.phase.as_str().into(),
        pools: places.map(|place| place.pool.clone()).collect(),
        message: status.message,
        failing: moves::failed_since(moved),
        since: created(&moved.metadata),
        done_bytes: status.bytes_done,
        total_bytes: status.bytes_total,
        copying_since: begun.map(|begun| begun.0),
        ..Work::default()
    })
}

fn running_revert(revert: &VolumeRevert) -> Option<Work> {
    let status = revert.status.clone().unwrap_or_default();
    if status.phase.is_final() {
        return None;
    }
    let of = [&revert.spec.group_snapshot, &revert.spec.snapshot];
    let of = of.into_iter().flatten().next();
    // From then on there is no way back.
    let has_switched = status.phase >= RevertPhase::Switching;
    let created = created(&revert.metadata);
    let deadline = created.filter(|_| !has_switched).and_then(|created| {
        let time = SignedDuration::try_from(revert.deadline().ok()?).ok()?;
        created.checked_add(time).ok()
    });
    let is_done = |state: MemberState| match has_switched {
        true => matches!(state, MemberState::Switched | MemberState::Reverted),
        false => state == MemberState::Prepared,
    };
    let done = status.members.iter().filter(|it| is_done(it.state)).count() as u64;
    let volumes = status.members.len() as u64;
    let handles = status.members.iter();
    let mut pools: Vec<String> = handles
        .filter_map(|member| Some(member.handle.parse::<VolumeId>().ok()?.pool.to_string()))
        .collect();
    pools.sort();
    pools.dedup();
    Some(Work {
        resource: "volumereverts",
        namespace: revert.namespace().unwrap_or_default(),
        name: revert.name_any(),
        what: match of {
            Some(snapshot) => format!("revert to snapshot {snapshot}"),
            None => "revert".into(),
        },
        phase: status.phase.as_str().into(),
        message: status.message,
        since: created,
        volumes: (volumes > 0).then_some((done, volumes)),
        pools,
        deadline,
        ..Work::default()
    })
}

fn created(meta: &::kube::api::ObjectMeta) -> Option<Timestamp> {
    meta.creation_timestamp.as_ref().map(|at| at.0)
}

#[cfg(test)]
mod tests {
    use ::kube::runtime::watcher::Event;
    use k8s_openapi::api::core::v1::PersistentVolume;
    use serde_json::{Value, json};

    use super::*;

    const FROM: &str = "11111111-2222-4333-8444-000000000001";
    const TO: &str = "11111111-2222-4333-8444-000000000002";
    const GIB: u64 = 1 << 30;

    fn at(minute: u32) -> String {
        format!("2026-01-02T03:{minute:02}:00Z")
    }

    fn time(minute: u32) -> Option<Timestamp> {
        Some(at(minute).parse().unwrap())
    }

    /// Volumes of claims in the pool that is emptied, of these sizes.
    fn volumes(sizes: &[&str]) -> Volumes {
        let volumes = Volumes::new("d", "key");
        for (n, size) in sizes.iter().enumerate() {
            let volume = json!({"metadata": {"name": format!("pv-{n}")},
                "spec": {"csi": {"driver": "d", "volumeHandle": format!("{FROM}.{FROM}")},
                    "capacity": {"storage": size},
                    "claimRef": {"namespace": "shop", "name": format!("data-{n}")}},
                "status": {"phase": "Bound"}});
            let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
            volumes.take(Event::Apply(volume));
        }
        volumes
    }

    fn moved(name: &str, created: u32, status: Value) -> (String, VolumeMove) {
        let mut object = json!({"metadata": {"name": name, "namespace": "shop",
                "creationTimestamp": at(created), "labels": {EVACUATES: FROM}},
            "spec": {"claim": name}, "status": status});
        object["status"]["from"] = json!({"pool": FROM});
        object["status"]["to"] = json!({"pool": TO, "node": "node-2"});
        (name.into(), serde_json::from_value(object).unwrap())
    }

    fn pool(left: u64) -> Pool {
        let condition = json!({"type": "Evacuated", "status": "False", "reason": "NotEmpty",
            "message": "in it are 2 volumes of claims", "lastTransitionTime": at(1)});
        serde_json::from_value(
            json!({"metadata": {"name": FROM}, "spec": {"evacuate": true},
            "status": {"name": "fast", "node": "node-1", "evacuation": {"left": left},
                "conditions": [condition]}}),
        )
        .unwrap()
    }

    #[test]
    fn an_evacuation_is_one_line_with_its_volumes_and_bytes() {
        let volumes = volumes(&["2Gi", "4Gi"]);
        let copying = json!({"phase": "Copying", "bytesDone": GIB, "bytesTotal": 2 * GIB});
        let done = json!({"phase": "Done", "bytesDone": 8 * GIB, "bytesTotal": 8 * GIB,
            "switchedAt": at(9)});
        let switched = json!({"phase": "Switched", "bytesDone": GIB, "bytesTotal": GIB,
            "switchedAt": at(9)});
        let aborted = json!({"phase": "Aborted", "bytesDone": GIB, "bytesTotal": 4 * GIB});
        let mut moves = BTreeMap::from([
            moved("data-0", 5, copying),
            moved("gone", 2, done.clone()),
            moved("going", 3, switched),
            moved("undone", 4, aborted),
        ]);
        // A move of before, which no evacuation has created.
        let (name, mut before) = moved("before", 0, done);
        before.metadata.labels = None;
        moves.insert(name, before);
        let work = evacuation(&pool(4), &moves, &volumes).unwrap();
        assert_eq!(work.what, "evacuation of pool fast of node node-1");
        assert_eq!(work.message, "in it are 2 volumes of claims");
        assert_eq!(work.volumes, Some((1, 4)));
        assert_eq!((work.done_bytes, work.total_bytes), (10 * GIB, 15 * GIB));
        assert_eq!((work.since, work.copying_since), (time(1), time(2)));
        assert_eq!(work.pools, [FROM]);

        // While all moves wait, nothing has a rate.
        let waits = json!({"phase": "Waiting", "bytesDone": 2 * GIB, "bytesTotal": 2 * GIB,
            "message": "delete pod db-0"});
        moves.extend([moved("data-0", 5, waits)]);
        let work = evacuation(&pool(4), &moves, &volumes).unwrap();
        assert_eq!((work.done_bytes, work.copying_since), (11 * GIB, None));
        assert!(evacuation(&pool(0), &moves, &volumes).is_none());
    }

    #[test]
    fn a_move_without_a_copy_in_advance_has_the_rate_of_its_only_copy() {
        let since = |status: Value| {
            let (_, object) = moved("data", 1, status);
            let work = running_move(&object).unwrap();
            assert_eq!(
                (work.since, work.pools),
                (time(1), vec![FROM.into(), TO.into()])
            );
            work.copying_since
        };
        assert_eq!(
            since(json!({"phase": "LastCopy", "fencedAt": at(7)})),
            time(7)
        );
        assert_eq!(since(json!({"phase": "Fenced", "fencedAt": at(7)})), None);
        let round = |round: u32, phase: &str| {
            since(json!({"phase": phase, "fencedAt": at(7),
                "preCopy": {"round": round, "begunAt": at(6)}}))
        };
        assert_eq!(round(1, "Copying"), time(6));
        assert_eq!(round(1, "LastCopy"), None, "the bytes of before count");
        assert_eq!(round(2, "Copying"), None);
    }

    #[test]
    fn a_revert_has_the_number_of_its_claims_that_are_done() {
        let revert = |phase: &str, states: [&str; 3]| {
            let member = |state: &&str| json!({"state": state, "handle": format!("{FROM}.{TO}")});
            let members: Vec<_> = states.iter().map(member).collect();
            let object = json!({"metadata": {"name": "back", "creationTimestamp": at(1)},
                "spec": {"groupSnapshot": "nightly"},
                "status": {"phase": phase, "members": members}});
            let object: VolumeRevert = serde_json::from_value(object).unwrap();
            running_revert(&object)
        };
        let work = revert("Preparing", ["Prepared", "Fenced", "Fenced"]).unwrap();
        assert_eq!((work.volumes, work.since), (Some((1, 3)), time(1)));
        assert_eq!((work.deadline, work.pools), (time(11), vec![FROM.into()]));
        let work = revert("Switching", ["Prepared", "Switched", "Reverted"]).unwrap();
        assert_eq!((work.volumes, work.deadline), (Some((2, 3)), None));
        assert!(revert("Done", ["Reverted"; 3]).is_none());
    }

    #[test]
    fn the_copies_of_moves_and_reverts_are_those_into_volumes_that_they_name() {
        let id = |n: u32| format!("{FROM}.11111111-2222-4333-8444-{n:012}");
        let (_, mut move_object) = moved("data", 1, json!({"phase": "Copying"}));
        move_object
            .status
            .as_mut()
            .unwrap()
            .to
            .as_mut()
            .unwrap()
            .handle = id(1);
        let part = Part {
            volume: id(1),
            ..Part::default()
        };
        assert_eq!(copied_by_move(&move_object), [part]);

        let states = ["Waiting", "Fenced", "Prepared", "Switched"];
        let members =
            (0..4).map(|n| json!({"state": states[n], "handle": format!("{FROM}.{FROM}")}));
        let members: Vec<Value> = members.collect();
        let object = json!({"metadata": {"name": "back"}, "spec": {"groupSnapshot": "nightly"},
            "status": {"phase": "Preparing", "members": members}});
        let object: VolumeRevert = serde_json::from_value(object).unwrap();
        let parts = copied_by_revert(&object, &volumes(&["2Gi"]));
        let bytes: Vec<_> = parts
            .iter()
            .map(|part| (part.waiting_bytes, part.done_bytes))
            .collect();
        assert_eq!(
            bytes,
            [(2 * GIB, 0), (2 * GIB, 0), (0, 2 * GIB), (0, 2 * GIB)]
        );
        let unknown = copied_by_revert(&object, &volumes(&[]));
        assert!(
            unknown
                .iter()
                .all(|part| part.waiting_bytes + part.done_bytes == 0)
        );
    }
}
