//! Deletions of orphans over time: with restarts of routers, with changes of clocks, and with objects that
//! name an orphan in between.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::{GroupId, PoolId};
use crate::router::kube::pools::object::PoolStatus;

const NODE: &str = "node-1";
const HOUR: SignedDuration = SignedDuration::from_hours(1);
const CHECK: SignedDuration = SignedDuration::from_mins(5);

fn id() -> PoolId {
    "11111111-2222-4333-8444-000000000001".parse().unwrap()
}

fn begun() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn orphan(name: &str) -> Orphan {
    Orphan {
        what: OrphanKind::Volume,
        id: name.into(),
        pool: id(),
        node: NODE.into(),
        source: String::new(),
        group: None,
    }
}

/// A pool that has been on its node for a year.
fn pool(requested: &[&str]) -> Pool {
    let mut pool = Pool::new(id(), "csi.slackwater.dev");
    pool.spec.delete_orphans = requested.iter().map(ToString::to_string).collect();
    pool.status = Some(PoolStatus {
        node: NODE.into(),
        health: Health::Healthy,
        placed_since: Some(Time(begun() - HOUR * (365 * 24))),
        ..PoolStatus::default()
    });
    pool
}

/// A check, whose result becomes the status of the pool.
fn check(pool: &mut Pool, unnamed: &[&Orphan], now: Timestamp) -> Plan {
    let plan = plan(pool, unnamed, Waits::default(), now);
    pool.status.as_mut().unwrap().orphans = plan.shown.clone();
    // It is written to the API server and read again.
    *pool = serde_json::from_value(json!(pool)).unwrap();
    plan
}

fn first(plan: &Plan) -> &PoolOrphan {
    &plan.shown.as_ref().unwrap().listed[0]
}

#[test]
fn an_orphan_is_kept_for_a_day_before_and_a_day_after_the_request_counts() {
    let (one, mut pool) = (orphan("a"), pool(&["a"]));
    let mut deleted = None;
    for n in 0..600 {
        let now = begun() + CHECK * n;
        let plan = check(&mut pool, &[&one], now);
        let hours = now.duration_since(begun()).as_hours();
        assert_eq!(first(&plan).since.0, begun());
        assert_eq!(first(&plan).delete_at.is_some(), hours >= 24, "{hours}");
        assert_eq!(first(&plan).message.is_empty(), hours >= 24, "{hours}");
        if !plan.due.is_empty() {
            assert_eq!(plan.due, std::slice::from_ref(&one));
            deleted = Some(hours);
            break;
        }
    }
    assert_eq!(deleted, Some(48));
}

#[test]
fn nothing_is_deleted_without_a_request() {
    let (one, mut pool) = (orphan("a"), pool(&["b"]));
    for n in 0..3000 {
        let plan = check(&mut pool, &[&one], begun() + CHECK * n);
        assert_eq!(plan.due, []);
        assert_eq!(plan.settled, ["b"]);
    }
}

#[test]
fn a_request_that_is_taken_back_and_repeated_begins_again() {
    let (one, mut pool) = (orphan("a"), pool(&["a"]));
    let mut now = begun();
    let mut until = |pool: &mut Pool, hours: i32| {
        let end = now + HOUR * hours;
        let mut due = 0;
        while now < end {
            now += CHECK;
            due += check(pool, &[&one], now).due.len();
        }
        due
    };
    assert_eq!(until(&mut pool, 47), 0);
    pool.spec.delete_orphans.clear();
    assert_eq!(until(&mut pool, 2), 0);
    pool.spec.delete_orphans = vec!["a".into()];
    assert_eq!(until(&mut pool, 23), 0);
    assert!(until(&mut pool, 2) > 0);
}

#[test]
fn who_is_not_deleted_reads_why() {
    let old = |pool: &mut Pool, one: &Orphan| {
        for n in 0..1200 {
            let plan = check(pool, &[one], begun() + CHECK * n);
            assert_eq!(plan.due, []);
        }
        first(&plan(
            pool,
            &[one],
            Waits::default(),
            begun() + CHECK * 1200,
        ))
        .message
        .clone()
    };
    let mut grouped = orphan("a");
    grouped.group = Some(GroupId(uuid::Uuid::from_u128(7)));
    let why = old(&mut pool(&["a"]), &grouped);
    assert!(why.contains("a member of group snapshot"), "{why}");
    type Change = fn(&mut Pool);
    let changes: [(Change, &str); 6] = [
        (|pool| pool.spec.lost = true, "not served by one node"),
        (
            |pool| status(pool).node = "node-2".into(),
            "not served by one node",
        ),
        (
            |pool| status(pool).health = Health::Conflict,
            "not served by one node",
        ),
        (
            |pool| status(pool).health = Health::Unreachable,
            "not served by one node",
        ),
        (
            |pool| status(pool).placed_since = None,
            "since when its pool",
        ),
        (
            |pool| status(pool).placed_since = Some(Time(begun())),
            "a pool that was moved",
        ),
    ];
    for (change, expected) in changes {
        let mut pool = pool(&["a"]);
        change(&mut pool);
        let why = old(&mut pool, &orphan("a"));
        assert!(why.contains(expected), "{expected}: {why}");
    }
}

fn status(pool: &mut Pool) -> &mut PoolStatus {
    pool.status.as_mut().unwrap()
}

/// The last look uses the Pool object as it is then.
#[test]
fn a_request_that_is_taken_back_in_the_last_moment_is_not_executed() {
    let (one, mut pool) = (orphan("a"), pool(&["a"]));
    let mut now = begun();
    while check(&mut pool, &[&one], now).due.is_empty() {
        now += CHECK;
    }
    let due = |pool: &Pool, now| is_due(pool, &one, Waits::default(), now);
    assert!(due(&pool, now));
    assert!(!due(&pool, now - CHECK));
    assert!(!due(&pool, now + HOUR), "no check has seen it since");
    type Change = fn(&mut Pool);
    let changes: [Change; 4] = [
        |pool| pool.spec.delete_orphans.clear(),
        |pool| pool.spec.lost = true,
        |pool| status(pool).node = "node-2".into(),
        |pool| status(pool).orphans = None,
    ];
    for change in changes {
        let mut pool = pool.clone();
        change(&mut pool);
        assert!(!due(&pool, now));
    }
}

/// It may come from a backup of the Pool objects.
#[test]
fn a_request_that_no_check_has_seen_for_a_day_is_removed() {
    let (one, mut pool) = (orphan("a"), pool(&["a"]));
    assert_eq!(
        check(&mut pool, &[&one], begun()).settled,
        Vec::<String>::new()
    );
    let later = begun() + HOUR * 25;
    let plan = check(&mut pool, &[&one], later);
    assert_eq!(plan.settled, ["a"]);
    assert_eq!(
        (first(&plan).since.0, &first(&plan).delete_at),
        (later, &None)
    );
}

#[test]
fn a_request_is_listed_however_many_orphans_there_are() {
    let all: Vec<Orphan> = (0..500).map(|n| orphan(&format!("{n:03}"))).collect();
    let all: Vec<&Orphan> = all.iter().collect();
    let mut pool = pool(&["499"]);
    let plan = check(&mut pool, &all, begun());
    let shown = plan.shown.as_ref().unwrap();
    assert_eq!((shown.count, shown.listed.len()), (500, MAX_LISTED));
    assert_eq!(first(&plan).id, "499");
}

/// What happens between two checks.
#[derive(Clone, Debug)]
enum Event {
    /// Time passes: this many minutes.
    Wait(i64),
    /// The clock of the router is changed, by hours.
    Clock(i64),
    /// An object names the orphan now, or does not any more.
    Name(bool),
    Request(bool),
    /// The status is lost.
    Lost,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        400 => (4..7_i64).prop_map(|checks| Event::Wait(checks * 5)),
        1 => (20..2000_i64).prop_map(Event::Wait),
        1 => (-60..60_i64).prop_map(Event::Clock),
        1 => any::<bool>().prop_map(Event::Name),
        2 => any::<bool>().prop_map(Event::Request),
        1 => Just(Event::Lost),
    ]
}

proptest! {
    /// The true time since the last check that did not find it as an orphan with a request is at least 24
    /// hours whenever one is deleted, and so is the time since it was named last.
    #[test]
    fn whatever_happens_it_is_kept_for_a_day(events in prop::collection::vec(event(), 100..900)) {
        let (one, mut pool) = (orphan("a"), pool(&["a"]));
        let (mut truth, mut offset) = (begun(), SignedDuration::ZERO);
        let mut is_named = false;
        let (mut named_last, mut asked_last) = (begun(), begun());
        for event in events {
            match event {
                Event::Wait(minutes) => truth += SignedDuration::from_mins(minutes),
                Event::Clock(hours) => offset += HOUR * i32::try_from(hours).unwrap(),
                Event::Name(now) => is_named = now,
                Event::Request(false) => pool.spec.delete_orphans.clear(),
                Event::Request(true) => pool.spec.delete_orphans = vec!["a".into()],
                Event::Lost => status(&mut pool).orphans = None,
            }
            if is_named {
                named_last = truth;
            }
            if pool.spec.delete_orphans.is_empty() {
                asked_last = truth;
            }
            let unnamed = if is_named { vec![] } else { vec![&one] };
            let plan = check(&mut pool, &unnamed, truth + offset);
            if !plan.due.is_empty() {
                let kept = SignedDuration::from_hours(24);
                prop_assert!(!is_named);
                prop_assert!(truth.duration_since(named_last) >= kept, "named {named_last}, deleted {truth}");
                prop_assert!(truth.duration_since(asked_last) >= kept, "asked {asked_last}, deleted {truth}");
            }
        }
    }
}
