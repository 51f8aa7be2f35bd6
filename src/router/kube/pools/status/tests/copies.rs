//! The copies that run in a pool.

use super::*;
use crate::agent::RunningCopy;

fn running(pool: u128, copied: u64, seconds: u64) -> RunningCopy {
    RunningCopy {
        kind: 1,
        id: format!("{}.{}", id(pool), uuid::Uuid::from_u128(7)),
        copied_bytes: copied,
        total_bytes: 100,
        running_seconds: seconds,
        ..RunningCopy::default()
    }
}

/// The last answer of the agent of node a has these pools and copies.
fn reports(sky: &mut Sky, pools: Vec<Shown>, copies: Vec<RunningCopy>) {
    sky.says("a", pools);
    let mut all = sky.reports.iter_mut();
    let report = all.find(|report| report.node == "a").unwrap();
    let (_, answer) = report.seen.as_mut().unwrap();
    Arc::make_mut(answer).copies = copies;
}

/// What the object of a pool has: the bytes of its copies, and when they were reported.
fn known(sky: &Sky, pool: u128) -> Option<(Vec<i64>, i64)> {
    let copies = sky.status(pool).copies.as_ref()?;
    let bytes = copies.running.iter().map(|copy| copy.bytes_done);
    let at = copies.reported_at.0.as_second() - time(0).as_second();
    Some((bytes.collect(), at))
}

#[test]
fn copies_are_on_the_object_of_their_pool_while_they_run() {
    let mut sky = Sky::new();
    let pools = || vec![shown(1), shown(2)];
    reports(&mut sky, pools(), Vec::new());
    sky.write();
    assert_eq!(known(&sky, 1), None);
    // The first looks come while the last write is younger than half a minute.
    for (now, is_written) in [
        (10, false),
        (29, false),
        (30, true),
        (59, false),
        (60, true),
    ] {
        sky.now = now;
        reports(&mut sky, pools(), vec![running(1, now as u64, now as u64)]);
        let written = sky.write().iter().any(|change| change.id == id(1));
        assert_eq!(written, is_written, "after {now} s");
    }
    assert_eq!(known(&sky, 1), Some((vec![60], 60)));
    assert_eq!(known(&sky, 2), None, "that of another pool is not its own");
    let since = &sky.status(1).copies.as_ref().unwrap().running[0].since;
    assert_eq!(*since, Time(time(0)));
    // The end is written at once.
    sky.now = 61;
    reports(&mut sky, pools(), Vec::new());
    sky.write();
    assert_eq!(known(&sky, 1), None);
}

#[test]
fn copies_of_an_agent_that_is_silent_stay_with_the_time_of_their_report() {
    let mut sky = Sky::new();
    reports(&mut sky, vec![shown(1)], vec![running(1, 5, 10)]);
    sky.write();
    sky.is_silent("a");
    sky.now = 200;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
    assert_eq!(known(&sky, 1), Some((vec![5], 0)));
    // Its agent was replaced, and the new one has begun no copy.
    sky.moves("a");
    sky.write();
    assert_eq!(known(&sky, 1), Some((vec![5], 0)));
    reports(&mut sky, vec![shown(1)], Vec::new());
    sky.write();
    assert_eq!(known(&sky, 1), None);
}

#[test]
fn a_pool_that_is_not_served_or_that_two_nodes_report_has_the_copies_of_its_node() {
    let mut sky = Sky::new();
    reports(&mut sky, vec![shown(1)], vec![running(1, 5, 10)]);
    sky.write();
    let away = Shown {
        refusal: "its disk is away".into(),
        ..shown(1)
    };
    sky.now = 30;
    reports(&mut sky, vec![away], vec![running(1, 6, 40)]);
    sky.write();
    assert_eq!(sky.status(1).health, Health::NotServed);
    assert_eq!(known(&sky, 1), Some((vec![6], 30)), "it is about to fail");
    // Another node claims the pool, without copies.
    sky.now = 60;
    reports(&mut sky, vec![shown(1)], vec![running(1, 7, 70)]);
    sky.says("b", vec![shown(1)]);
    sky.write();
    assert_eq!(sky.status(1).node, "a");
    assert_eq!(known(&sky, 1), Some((vec![7], 60)));
    let forgotten = Shown {
        forgotten: true,
        refusal: "it was forgotten".into(),
        ..shown(1)
    };
    sky.now = 90;
    sky.reports.clear();
    reports(&mut sky, vec![forgotten], Vec::new());
    sky.write();
    assert_eq!(sky.status(1).health, Health::Forgotten);
    assert_eq!(known(&sky, 1), None);
}

#[test]
fn a_crd_that_does_not_keep_copies_is_written_twice_a_minute_at_most() {
    let mut sky = Sky::new();
    reports(&mut sky, vec![shown(1)], vec![running(1, 5, 10)]);
    sky.write();
    let mut writes = 0;
    for now in 1..=300 {
        sky.now = now;
        let status = sky.pools.get_mut(&id(1)).unwrap().status.as_mut().unwrap();
        status.copies = None;
        reports(
            &mut sky,
            vec![shown(1)],
            vec![running(1, 5, 10 + now as u64)],
        );
        let changes = sky.changes();
        writes += changes.len();
        if !changes.is_empty() {
            sky.write();
        }
    }
    assert_eq!(writes, 10);
}

/// It names the volume alone, and counts nothing but its bytes.
#[test]
fn an_agent_of_an_earlier_release_reports_none() {
    let mut sky = Sky::new();
    let earlier = RunningCopy {
        volume_name: "pvc-1".into(),
        copied_bytes: 5,
        total_bytes: 9,
        ..RunningCopy::default()
    };
    reports(&mut sky, vec![shown(1)], vec![earlier]);
    sky.write();
    assert_eq!(known(&sky, 1), None);
    assert_eq!(sky.status(1).health, Health::Healthy);
}
