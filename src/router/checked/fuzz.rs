//! Fuzzing of the answers that agents give in lists and texts of any length.

use slackwater_core::fuzz::fuzz_message;

use super::*;
use crate::agent::image_usage::{Growth, Volume};
use crate::agent::{NotGrown, RunningCopy};

const POOL: &str = "6f1a2b3c-0000-4000-8000-000000000001";

#[test]
fn fuzz_descriptions() {
    let pool = Pool {
        name: "default".into(),
        place: "file:/var/lib/slackwater/pool".into(),
        id: POOL.into(),
        total_bytes: 1 << 40,
        available_bytes: 1 << 39,
        promisable_bytes: 1 << 39,
        file_system: "xfs".into(),
        changed_devices: vec!["loop3".into()],
        pods: vec!["web-0".into()],
        images: Some(ImageUsage {
            own_bytes: 1 << 30,
            shared_bytes: 1 << 31,
            snapshot_bytes: 1 << 29,
            undivided_bytes: 1 << 28,
            unmeasured_volumes: 1,
            measured_at: 1_700_000_000,
            growth: Some(Growth {
                volumes: vec![Volume {
                    volume_id: format!("{POOL}.{POOL}"),
                    grown_bytes: 1 << 20,
                    since: 1_700_000_000,
                }],
            }),
        }),
        ..Pool::default()
    };
    let valid = DescribeResponse {
        node_name: "node-1".into(),
        driver_name: "csi.example.com".into(),
        version: "0.1.0".into(),
        home: POOL.into(),
        pools: vec![pool],
        unsettled_groups: vec![POOL.into()],
        not_grown: vec![NotGrown {
            volume_id: format!("{POOL}.{POOL}"),
            reason: "its file system is busy".into(),
        }],
        copies: vec![RunningCopy {
            volume_name: "pvc-1".into(),
            copied_bytes: 5,
            total_bytes: 9,
            kind: 1,
            id: format!("{POOL}.{POOL}"),
            claim: "shop/data".into(),
            source_node: "node-2".into(),
            running_seconds: 10,
            before_bytes: 3,
        }],
        long_freezes: vec![LongFreeze {
            volume_id: format!("{POOL}.{POOL}"),
            since: 1_700_000_000,
            until: 1_700_000_010,
            held: true,
        }],
        ..DescribeResponse::default()
    };
    fuzz_message("answer to Describe", &valid, |answer| {
        description(answer.clone())
    });
}

/// An agent reports the growth of volumes of its own pools alone, and numbers that can be.
#[test]
fn what_an_agent_counts_is_of_its_pool() {
    let volume = |volume_id: &str, grown_bytes: i64| Volume {
        volume_id: volume_id.into(),
        grown_bytes,
        since: 1,
    };
    let (own, other) = (format!("{POOL}.{POOL}"), POOL.replace('1', "2"));
    let pool = |own_bytes: i64| Pool {
        id: POOL.into(),
        images: Some(ImageUsage {
            own_bytes,
            growth: Some(Growth {
                volumes: vec![
                    volume(&own, -1),
                    volume(&format!("{other}.{POOL}"), 3),
                    volume("<b>", 4),
                    volume(&own, 5),
                ],
            }),
            ..ImageUsage::default()
        }),
        ..Pool::default()
    };
    let checked = |own_bytes: i64| {
        let answer = DescribeResponse {
            pools: vec![pool(own_bytes)],
            ..DescribeResponse::default()
        };
        description(answer).unwrap().pools.remove(0).images
    };
    let growth = checked(7).unwrap().growth.unwrap();
    assert_eq!(growth.volumes, [volume(&own, 5)]);
    assert_eq!(checked(-7), None);
}

#[test]
fn fuzz_groups() {
    let group: GroupId = POOL.parse().unwrap();
    let source: VolumeId = format!("{POOL}.{POOL}").parse().unwrap();
    let member = member_of(group, source).to_string();
    let valid = GetGroupResponse {
        members: vec![GroupMember {
            snapshot_id: member.clone(),
            source_volume_id: source.to_string(),
            size_bytes: 1 << 30,
            cut_at: 1_700_000_000,
            level: "filesystem".into(),
            ..GroupMember::default()
        }],
        all_source_volume_ids: vec![source.to_string()],
        all_member_ids: vec![member],
        ..GetGroupResponse::default()
    };
    fuzz_message("answer to GetGroup", &valid, |answer| {
        share(group, answer, |pool| pool == source.pool)
    });
}
