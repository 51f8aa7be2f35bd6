//! `slackwater volumes`: lists volumes and snapshots on the pools, also while a driver is running.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{Failure, Place, print, real_host, status};
use crate::model::VolumeId;
use crate::model::size::HumanBytes;
use crate::operation::pools::inventory::{
    self, Inventory, PoolPresence, SnapshotEntry, VolumeEntry,
};
use crate::record::{FormattedAs, SnapshotState, VolumeState};

/// Lists the volumes of the configured pools, or of all pools that this machine has had. Exit code
/// 1 if a pool or a record cannot be read, because the list is then incomplete.
pub(super) fn run(place: Place) -> Result<ExitCode, Failure> {
    let arguments = place.with_file()?;
    let host = real_host(&[], &arguments.pools);
    let mut whole = Inventory::default();
    let mut unread = Vec::new();
    for pool in inventory::pools(host.as_ref(), &arguments.node_record, &arguments.pools)? {
        if !pool.configured && !arguments.pools.is_empty() || pool.state == PoolPresence::Forgotten
        {
            continue;
        }
        let (Some(id), PoolPresence::Here | PoolPresence::OtherHome, Some(path)) =
            (pool.id, &pool.state, &pool.folder)
        else {
            unread.push(format!(
                "pool {} at {}: {}",
                pool.name,
                pool.place,
                why(&pool.state)
            ));
            continue;
        };
        let found = inventory::read_entry(host.as_ref(), &pool, id, path)?;
        whole.volumes.extend(found.volumes);
        whole.snapshots.extend(found.snapshots);
        whole.damaged.extend(found.damaged);
    }
    if arguments.json {
        print::json(&as_json(&whole, &unread));
    } else {
        print::table(
            ["ID", "NAME", "POOL", "SIZE", "USED", "FORMAT", "STATE"],
            &whole.volumes.iter().map(row).collect::<Vec<_>>(),
        );
        let thin: Vec<_> = whole.volumes.iter().filter_map(thin_row).collect();
        if !thin.is_empty() {
            println!();
            print::table(["ID", "CLAIM", "THIN ID", "MAPPED", "DEVICE"], &thin);
        }
        if !whole.snapshots.is_empty() {
            println!();
            print::table(
                [
                    "SNAPSHOT",
                    "NAME",
                    "POOL",
                    "SOURCE VOLUME",
                    "SIZE",
                    "LEVEL",
                    "STATE",
                ],
                &whole.snapshots.iter().map(snapshot_row).collect::<Vec<_>>(),
            );
        }
    }
    for damaged in &whole.damaged {
        eprintln!(
            "slackwater: {} is damaged: {}",
            damaged.path.display(),
            damaged.problem
        );
    }
    for pool in &unread {
        eprintln!("slackwater: {pool}");
    }
    Ok(status(whole.damaged.is_empty() && unread.is_empty()))
}

fn why(state: &PoolPresence) -> &str {
    match state {
        PoolPresence::Unreadable(problem) => problem,
        PoolPresence::Absent => "there is nothing at its path; is its disk mounted?",
        PoolPresence::Blank => "no pool was created there yet",
        PoolPresence::Here | PoolPresence::OtherHome | PoolPresence::Forgotten => state.as_str(),
    }
}

fn id(entry: &VolumeEntry) -> String {
    VolumeId {
        pool: entry.pool_id,
        uuid: entry.record.uuid,
    }
    .to_string()
}

fn state(entry: &VolumeEntry) -> &'static str {
    match entry.record.state {
        VolumeState::Creating => "creating",
        VolumeState::Ready => "ready",
    }
}

fn formatted_as(entry: &VolumeEntry) -> Option<&'static str> {
    let formatted = entry.record.formatted.as_ref()?;
    Some(match formatted.kind {
        FormattedAs::Raw => "block",
        fs => fs.as_str(),
    })
}

fn row(entry: &VolumeEntry) -> [String; 7] {
    [
        id(entry),
        entry.record.name.escape_debug().to_string(),
        entry.pool.clone(),
        HumanBytes(entry.record.size).to_string(),
        HumanBytes(entry.allocated).to_string(),
        formatted_as(entry).unwrap_or("-").into(),
        state(entry).into(),
    ]
}

/// The name that device mapper has for a device with this UUID.
fn device_name(uuid: &str) -> String {
    uuid.to_ascii_lowercase()
}

fn thin_row(entry: &VolumeEntry) -> Option<[String; 5]> {
    let thin = entry.thin.as_ref()?;
    Some([
        id(entry),
        entry.record.claim.clone().unwrap_or_else(|| "-".into()),
        thin.id.to_string(),
        HumanBytes(entry.allocated).to_string(),
        device_name(&thin.device),
    ])
}

fn snapshot_state(entry: &SnapshotEntry) -> &'static str {
    match entry.record.state {
        SnapshotState::Preparing if entry.record.is_base() => "base",
        SnapshotState::Preparing => "preparing",
        SnapshotState::Cut => "cut",
        SnapshotState::Ready => "ready",
    }
}

fn snapshot_ids(entry: &SnapshotEntry) -> [String; 2] {
    let id = |uuid| VolumeId {
        pool: entry.pool_id,
        uuid,
    };
    [entry.record.uuid, entry.record.source].map(|uuid| id(uuid).to_string())
}

fn snapshot_row(entry: &SnapshotEntry) -> [String; 7] {
    let [id, source] = snapshot_ids(entry);
    [
        id,
        entry.record.name.escape_debug().to_string(),
        entry.pool.clone(),
        source,
        HumanBytes(entry.record.size).to_string(),
        entry.record.level.to_string(),
        snapshot_state(entry).into(),
    ]
}

fn snapshot_json(entry: &SnapshotEntry) -> Value {
    let [id, source] = snapshot_ids(entry);
    let record = &entry.record;
    json!({
        "id": id, "name": record.name, "pool": entry.pool, "state": snapshot_state(entry),
        "source_volume_id": source, "size_bytes": record.size,
        "allocated_bytes": entry.allocated, "cut_at_ns": record.cut_at,
        "level": record.level.as_str(), "reason": record.reason,
        "group_snapshot_id": record.group.as_ref().map(|group| group.id),
        "copied_bytes": record.copy.map(|copy| copy.copied),
    })
}

fn as_json(whole: &Inventory, unread: &[String]) -> Value {
    let volumes: Vec<Value> = whole
        .volumes
        .iter()
        .map(|entry| {
            let record = &entry.record;
            let mut listed = json!({
                "id": id(entry), "name": record.name, "pool": entry.pool, "state": state(entry),
                "size_bytes": record.size, "allocated_bytes": entry.allocated,
                "allocation": record.allocation.as_str(), "block_size": record.block_size,
                "wipe": record.wipe.as_str(), "formatted": formatted_as(entry),
                "ephemeral": record.ephemeral, "created_at": record.created_at, "claim": record.claim,
                "last_staging_path": record.last_stage.as_ref().map(|stage| &stage.staging_path),
            });
            if let Some(thin) = &entry.thin {
                listed["thin_id"] = thin.id.into();
                listed["device"] = device_name(&thin.device).into();
            }
            listed
        })
        .collect();
    let damaged: Vec<Value> = whole
        .damaged
        .iter()
        .map(|entry| json!({ "pool": entry.pool, "path": entry.path, "problem": entry.problem }))
        .collect();
    let snapshots: Vec<Value> = whole.snapshots.iter().map(snapshot_json).collect();
    json!({ "volumes": volumes, "snapshots": snapshots, "damaged": damaged, "unread_pools": unread })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::PoolId;
    use crate::operation::pools::inventory::{DamagedEntry, ThinEntry};
    use crate::record::formats::files;
    use crate::record::{Record, decode};

    fn record<T: Record>(kind: &str, name: &str) -> T {
        decode(Path::new(name), &files(kind)[name]).unwrap()
    }

    /// Scripts of users read the keys.
    #[test]
    fn the_list_keeps_its_keys() {
        let pool_id = PoolId(uuid::Uuid::from_u128(1));
        let volume = VolumeEntry {
            pool: "default".into(),
            pool_id,
            record: record("volume", "every-field.json"),
            allocated: 4096,
            thin: Some(ThinEntry {
                id: 5,
                device: "SLACKWATER-pool-volume".into(),
            }),
        };
        let snapshot = SnapshotEntry {
            pool: "default".into(),
            pool_id,
            record: record("snapshot", "member.json"),
            allocated: 4096,
        };
        let damaged = DamagedEntry {
            pool: "default".into(),
            path: "/pool/volumes/1".into(),
            problem: "not a record".into(),
        };
        let whole = Inventory {
            volumes: vec![volume],
            snapshots: vec![snapshot],
            damaged: vec![damaged],
        };
        insta::assert_json_snapshot!(as_json(&whole, &["the pool is absent".into()]));
    }
}
