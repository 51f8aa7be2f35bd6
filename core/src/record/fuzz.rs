//! Fuzzing of records, beginning with files that earlier releases have written.

#![allow(clippy::unwrap_used, reason = "of tests alone")]

use std::fmt::Debug;
use std::path::Path;

use super::formats::files;
#[cfg(test)]
use super::*;
use super::{Record, decode, encode};
use crate::error::Error;
use crate::fuzz::fuzz;

/// Fuzzes a record, beginning with the files of a kind: what decodes is written so that it decodes to
/// the same. The planted bug is to panic at a record for which `planted` is true.
#[track_caller]
pub fn records<T: Record + PartialEq + Debug>(kind: &str, planted: impl Fn(&T) -> bool) {
    let path = Path::new("/record.json");
    let seeds: Vec<_> = files(kind).into_values().collect();
    let target = |bytes: &[u8]| {
        if let Ok(record) = decode::<T>(path, bytes) {
            match encode(path, Some(bytes), &record) {
                Ok(written) => assert_eq!(decode::<T>(path, &written).unwrap(), record),
                // A field that this program does not know, and cannot write back.
                Err(error) => assert!(matches!(error, Error::Damaged { .. }), "{error:?}"),
            }
        }
    };
    fuzz(kind, &seeds, target, |bytes| {
        assert!(!decode(path, bytes).is_ok_and(|record| planted(&record)));
    });
}

#[test]
fn fuzz_volume_records() {
    records::<VolumeRecord>("volume", |record| record.size % 4096 != 0);
}

#[test]
fn fuzz_snapshot_records() {
    records::<SnapshotRecord>("snapshot", |record| record.size % 4096 != 0);
}

#[test]
fn fuzz_pool_records() {
    records::<PoolRecord>("pool", |record| record.created_at == 0);
}

#[test]
fn fuzz_node_records() {
    let is_longer = |pool: &node::KnownPool| pool.name.len() > 20;
    records::<NodeRecord>("node", |record| record.pools.values().any(is_longer));
}

#[test]
fn fuzz_image_records() {
    records::<ImageRecord>("image", |record| record.size % 4096 != 0);
}

#[test]
fn fuzz_records_of_the_filter_of_lvm() {
    records::<LvmFilterRecord>("lvm-filter", |record| record.checked_at < 1_700_000_000);
}

#[test]
fn fuzz_origins_of_snapshots() {
    let seeds: Vec<_> = files("snapshot").into_values().collect();
    let parse = SnapshotOrigin::parse;
    let names: Vec<_> = seeds.iter().map(|seed| parse(seed).unwrap().name).collect();
    let target = |bytes: &[u8]| drop(parse(bytes));
    fuzz("origin", &seeds, target, |bytes| {
        assert!(parse(bytes).is_none_or(|origin| names.contains(&origin.name)));
    });
}
