//! States of a cluster as time passes.

mod copies;
mod images;
mod requests;

use super::*;
use crate::agent::Pool as Shown;
use crate::agent::describe_response::LongFreeze;
use crate::router::kube::pools::object::FrozenVolume;

const DRIVER: &str = "csi.example";

struct Sky {
    now: i64,
    reports: Vec<Report>,
    pools: BTreeMap<PoolId, Pool>,
    homes: BTreeMap<PoolId, BTreeMap<String, usize>>,
    nodes: BTreeSet<String>,
    evacuations: BTreeMap<PoolId, Checked>,
    lost_after: Option<Duration>,
    pods: BTreeMap<String, String>,
    orphans: BTreeMap<PoolId, (Time, Option<PoolOrphans>)>,
    requests: PoolRequests,
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + seconds).unwrap()
}

fn id(n: u128) -> PoolId {
    uuid::Uuid::from_u128(n).to_string().parse().unwrap()
}

fn shown(n: u128) -> Shown {
    Shown {
        name: "default".into(),
        place: "file:/pool".into(),
        id: id(n).to_string(),
        total_bytes: 100 << 30,
        available_bytes: 40 << 30,
        volumes: 3,
        ..Shown::default()
    }
}

impl Sky {
    fn new() -> Sky {
        Sky {
            now: 0,
            reports: Vec::new(),
            pools: BTreeMap::new(),
            homes: BTreeMap::new(),
            nodes: ["a".to_string(), "b".into()].into(),
            evacuations: BTreeMap::new(),
            lost_after: None,
            pods: BTreeMap::new(),
            orphans: BTreeMap::new(),
            requests: PoolRequests::new(),
        }
    }

    /// The agent of a node reports this now.
    fn says(&mut self, node: &str, pools: Vec<Shown>) {
        let answer = DescribeResponse {
            node_name: node.into(),
            home: format!("home-of-{node}"),
            version: "1".into(),
            guard_alive: true,
            pools,
            ..DescribeResponse::default()
        };
        self.reports.retain(|report| report.node != node);
        self.reports.push(Report {
            node: node.into(),
            seen: Some((time(self.now), Arc::new(answer))),
            problem: None,
            is_refused: false,
        });
    }

    /// The last answer of the agent of a node also had these.
    fn freezes(&mut self, node: &str, freezes: Vec<LongFreeze>) {
        let mut reports = self.reports.iter_mut();
        let report = reports.find(|report| report.node == node).unwrap();
        let (_, answer) = report.seen.as_mut().unwrap();
        Arc::make_mut(answer).long_freezes = freezes;
    }

    fn is_silent(&mut self, node: &str) {
        for report in &mut self.reports {
            if report.node == node {
                report.problem = Some("connection refused".into());
            }
        }
    }

    /// Its pod was replaced, and the new address does not answer yet.
    fn moves(&mut self, node: &str) {
        self.is_silent(node);
        for report in &mut self.reports {
            if report.node == node {
                report.seen = None;
            }
        }
    }

    fn changes(&self) -> Vec<Change> {
        let statuses = PoolStatuses {
            requests: self.requests.clone(),
            orphans: self.orphans.clone(),
            reports: self.reports.clone(),
            pools: self.pools.clone(),
            homes: self.homes.clone(),
            pods: self.pods.clone(),
            nodes: self.nodes.clone(),
            evacuations: self.evacuations.clone(),
            lost_after: self.lost_after,
            unreachable_after: UNREACHABLE_AFTER,
            leads_since: time(0),
            now: time(self.now),
        };
        let observed = statuses.observed();
        let each = observed.iter();
        each.filter_map(|pool| pool.all.change(pool.id, &pool.reported))
            .collect()
    }

    /// Writes the changes that are due, through JSON as the API does.
    fn write(&mut self) -> Vec<Change> {
        let changes = self.changes();
        for change in &changes {
            let fresh = || Pool::new(change.id, DRIVER);
            let pool = self.pools.entry(change.id).or_insert_with(fresh);
            let status = serde_json::to_value(&change.status).unwrap();
            pool.status = Some(serde_json::from_value(status).unwrap());
            pool.spec.lost |= change.lose.is_some();
        }
        assert_eq!(self.changes(), [], "what is written is not written again");
        changes
    }

    fn status(&self, n: u128) -> &PoolStatus {
        self.pools[&id(n)].status.as_ref().unwrap()
    }
}

fn on(n: u128, without: &str, any_mount: bool) -> Shown {
    Shown {
        file_system: "xfs".into(),
        mount: "/dev/sda2[/pool]".into(),
        shares_blocks: true,
        without_mount: without.into(),
        any_mount,
        ..shown(n)
    }
}

fn conditions(sky: &Sky, n: u128) -> Vec<(String, String, String)> {
    let all = &sky.status(n).conditions;
    let words = |one: &Condition| (one.type_.clone(), one.status.clone(), one.reason.clone());
    all.iter().map(words).collect()
}

#[test]
fn what_a_pool_lies_on_is_reported_and_a_pool_without_a_mount_has_a_condition() {
    let mut sky = Sky::new();
    let why = "no file system is mounted at /pool";
    sky.says(
        "a",
        vec![
            on(1, "", false),
            on(2, why, false),
            on(3, why, true),
            shown(4),
        ],
    );
    sky.write();
    let status = sky.status(1);
    assert_eq!(status.file_system, "xfs");
    assert_eq!(status.mount, "/dev/sda2[/pool]");
    assert_eq!(status.shares_blocks, Some(true));
    let own = |status: &str, reason: &str| {
        vec![(
            "OwnMount".to_string(),
            status.to_string(),
            reason.to_string(),
        )]
    };
    assert_eq!(conditions(&sky, 1), own("True", "Mounted"));
    assert_eq!(conditions(&sky, 2), own("False", "NotMounted"));
    assert_eq!(conditions(&sky, 3), own("False", "AnyMount"));
    assert_eq!(conditions(&sky, 4), [], "an agent that doesn't tell");
    assert_eq!(sky.status(4).shares_blocks, None);
    for n in 1..=3 {
        assert_eq!(
            sky.status(n).health,
            Health::Healthy,
            "it is served as before"
        );
    }
    let message = &sky.status(2).conditions[0].message;
    assert!(
        message.starts_with(why) && message.contains("mount=any"),
        "{message}"
    );

    // A disk is missing for a while: the time of the last transition and the earlier report are
    // kept.
    let since = sky.status(2).conditions[0].last_transition_time.clone();
    sky.now = 90;
    let away = Shown {
        refusal: "its disk is away".into(),
        ..shown(1)
    };
    sky.says(
        "a",
        vec![away, on(2, why, false), on(3, why, true), shown(4)],
    );
    sky.write();
    assert_eq!(sky.status(1).mount, "/dev/sda2[/pool]");
    assert_eq!(conditions(&sky, 1), own("True", "Mounted"));
    assert_eq!(sky.status(2).conditions[0].last_transition_time, since);
    sky.now = 180;
    sky.says("a", vec![on(1, why, false), on(2, "", false)]);
    sky.write();
    assert_eq!(conditions(&sky, 1), own("False", "NotMounted"));
    assert_ne!(sky.status(2).conditions[0].last_transition_time, since);
}

#[test]
fn a_crd_that_does_not_keep_what_a_pool_lies_on_is_written_once_a_minute_at_most() {
    let mut sky = Sky::new();
    let on_disk = || Shown {
        file_system: "xfs".into(),
        mount: "/dev/sdb1".into(),
        ..shown(1)
    };
    sky.says("a", vec![on_disk()]);
    sky.write();
    let status = sky.pools.get_mut(&id(1)).unwrap().status.as_mut().unwrap();
    (status.file_system, status.mount) = Default::default();
    (status.shares_blocks, status.conditions) = Default::default();
    sky.now = 30;
    sky.says("a", vec![on_disk()]);
    assert_eq!(sky.changes(), []);
    sky.now = 60;
    sky.says("a", vec![on_disk()]);
    assert_eq!(sky.changes().len(), 1);
}

#[test]
fn what_is_frozen_for_long_is_shown_with_the_time_at_which_that_was_seen() {
    let freeze = |pool: u128, volume: u128, since: i64| LongFreeze {
        volume_id: format!("{}.{}", id(pool), uuid::Uuid::from_u128(volume)),
        since,
        until: since + 10,
        held: true,
    };
    let mut sky = Sky::new();
    let pools = || vec![shown(1), shown(2)];
    sky.says("a", pools());
    sky.write();
    let many = (0..30).map(|n| freeze(1, n, 1_700_000_000 + n as i64));
    sky.now = 60;
    sky.says("a", pools());
    sky.freezes(
        "a",
        many.chain([freeze(3, 7, 5), freeze(1, 8, i64::MAX - 10)])
            .collect(),
    );
    sky.write();
    let frozen = &sky.status(1).frozen;
    assert_eq!(frozen.len(), 20);
    let first = FrozenVolume {
        id: freeze(1, 0, 0).volume_id,
        since: Time(time(0)),
        until: Time(time(10)),
        held: true,
    };
    assert_eq!(frozen[0], first);
    assert_eq!(
        sky.status(2).frozen,
        [],
        "those of other pools are not its own"
    );
    // It is not known any more whether they are frozen.
    sky.is_silent("a");
    sky.now = 200;
    sky.write();
    assert_eq!(sky.status(1).frozen.len(), 20);
    assert_eq!(sky.status(1).last_seen, Some(Time(time(60))));
    sky.says("a", pools());
    sky.write();
    assert_eq!(sky.status(1).frozen, []);
    // The CRD of the previous release does not keep it.
    sky.freezes("a", vec![freeze(1, 1, 1_700_000_000)]);
    sky.now = 230;
    assert_eq!(sky.changes(), []);
}

#[test]
fn an_agent_whose_pod_is_another_is_waited_for() {
    let mut sky = Sky::new();
    sky.now = 100;
    sky.says("a", vec![shown(1)]);
    sky.write();
    sky.moves("a");
    sky.now = 189;
    assert_eq!(sky.changes(), [], "an upgrade is no alarm");
    sky.now = 190;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
}

#[test]
fn a_pool_gets_an_object_and_nothing_is_written_twice() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    let changes = sky.write();
    assert!(changes[0].is_new && !changes[0].turned, "{changes:?}");
    let status = sky.status(1);
    assert_eq!((status.node.as_str(), status.kind.as_str()), ("a", "file"));
    assert_eq!(
        (status.capacity.as_str(), status.available.as_str()),
        ("100Gi", "40Gi")
    );
    assert_eq!(status.health, Health::Healthy);
    // Numbers that change all the time are written after a minute; the health is written at once.
    sky.now = 59;
    let mut less = shown(1);
    less.available_bytes = 1;
    sky.says("a", vec![less.clone()]);
    assert_eq!(sky.changes(), []);
    sky.now = 60;
    sky.says("a", vec![less.clone()]);
    assert_eq!(sky.write().len(), 1);
    assert_eq!(sky.status(1).last_seen, Some(Time(time(60))));
    sky.now = 65;
    less.refusal = "is its disk mounted?".into();
    sky.says("a", vec![less]);
    let changes = sky.write();
    assert!(changes[0].turned && !changes[0].is_new);
    assert_eq!(sky.status(1).health, Health::NotServed);
    assert_eq!(sky.status(1).since, Some(Time(time(65))));
}

#[test]
fn an_agent_that_is_gone_leaves_its_pools_as_they_were_seen() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    sky.now = 20;
    sky.is_silent("a");
    assert_eq!(sky.changes(), [], "it may be restarted");
    sky.now = 40;
    let changes = sky.write();
    assert!(changes[0].turned);
    let status = sky.status(1);
    assert_eq!(status.health, Health::Unreachable);
    assert!(
        status.message.contains("connection refused"),
        "{}",
        status.message
    );
    assert_eq!(
        status.last_seen,
        Some(Time(time(0))),
        "when it was heard of"
    );
    assert_eq!(
        (status.since.clone(), status.volumes),
        (Some(Time(time(40))), 3)
    );
    for later in [100, 10_000] {
        sky.now = later;
        assert_eq!(sky.changes(), [], "nothing more is to be said");
    }
    sky.says("a", vec![shown(1)]);
    assert!(sky.write()[0].turned, "its return is reported");
    // An agent that answers and no longer reports it.
    sky.says("a", vec![]);
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
    assert!(sky.status(1).message.contains("is its disk present?"));
}

#[test]
fn a_new_leader_does_not_take_those_it_has_not_asked_for_gone() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    sky.reports.clear();
    sky.now = 29;
    assert_eq!(sky.changes(), []);
    sky.now = 30;
    sky.write();
    assert!(sky.status(1).message.contains("node a has no agent"));
}

#[test]
fn a_lost_pool_that_returns_is_quarantined() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    sky.says("a", vec![]);
    sky.pools.get_mut(&id(1)).unwrap().spec.lost = true;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Lost);
    sky.says("b", vec![shown(1)]);
    assert!(sky.write()[0].turned);
    assert_eq!(sky.status(1).health, Health::Quarantined);
    assert!(sky.status(1).message.contains("node b reports it"));
    sky.pools.get_mut(&id(1)).unwrap().spec.lost = false;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Healthy);
    assert_eq!(sky.status(1).node, "b");
}

#[test]
fn two_that_show_the_same_pool_are_both_named() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.says("b", vec![shown(1), shown(2)]);
    sky.write();
    assert_eq!(sky.status(1).health, Health::Conflict);
    assert!(sky.status(1).message.contains("nodes a and b"));
    assert_eq!(sky.status(2).health, Health::Healthy);
    // A node that has forgotten the pool does not count.
    let mut forgotten = shown(1);
    forgotten.forgotten = true;
    sky.says("a", vec![forgotten.clone()]);
    sky.write();
    assert_eq!(
        (sky.status(1).health, sky.status(1).node.as_str()),
        (Health::Healthy, "b")
    );
    // Only node b can report that the pool at its new place was forgotten.
    sky.says("b", vec![]);
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
    sky.says("b", vec![forgotten]);
    sky.write();
    assert_eq!(sky.status(1).health, Health::Forgotten);
    // Its object can be deleted, and is not created again.
    sky.pools.remove(&id(1));
    assert_eq!(sky.changes(), []);
}

#[test]
fn a_pool_that_its_node_misses_is_served_elsewhere_once_an_administrator_says_so() {
    let mut sky = Sky::new();
    let mut missing = shown(1);
    missing.refusal = "is its disk mounted?".into();
    sky.says("a", vec![missing.clone()]);
    sky.write();
    sky.says("b", vec![shown(1)]);
    sky.write();
    let status = sky.status(1);
    assert_eq!(
        (status.health, status.node.as_str()),
        (Health::NotServed, "a")
    );
    for words in ["is its disk mounted?", "node b", "pool hand-over"] {
        assert!(status.message.contains(words), "{}", status.message);
    }
    let mark = |sky: &mut Sky, node: Option<&str>| {
        sky.pools.get_mut(&id(1)).unwrap().spec.node = node.map(Into::into);
    };
    mark(&mut sky, Some("b"));
    let changes = sky.changes();
    assert!(changes[0].handed_over && changes[0].turned, "{changes:?}");
    // The field is removed when the node has the pool, which does not change any more.
    sky.pools.get_mut(&id(1)).unwrap().status = Some(changes[0].status.clone());
    assert!(sky.changes()[0].handed_over, "until it's away");
    mark(&mut sky, None);
    assert_eq!(sky.changes(), []);
    let status = sky.status(1);
    assert_eq!(
        (status.health, status.node.as_str(), status.home.as_str()),
        (Health::Healthy, "b", "home-of-b")
    );
    sky.says("b", vec![missing]);
    sky.write();
    let status = sky.status(1);
    assert_eq!(
        (status.health, status.node.as_str()),
        (Health::NotServed, "b")
    );
}

#[test]
fn a_pool_of_a_silent_node_stays_its_own_until_the_node_ends() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    // Both report it: the node that had it keeps it, and the other is named.
    sky.says("b", vec![shown(1)]);
    sky.write();
    let status = sky.status(1);
    assert_eq!(
        (status.health, status.node.as_str()),
        (Health::Degraded, "a")
    );
    assert!(status.message.contains("node b also reports it"));
    // It does not answer any more, and the other reports that it was forgotten, or serves it.
    for forgotten in [true, false] {
        let mut claimed = shown(1);
        claimed.forgotten = forgotten;
        sky.is_silent("a");
        sky.now += 40;
        sky.says("b", vec![claimed]);
        sky.write();
        let status = sky.status(1);
        assert_eq!(
            (status.health, status.node.as_str()),
            (Health::Unreachable, "a")
        );
    }
    assert!(sky.status(1).message.contains("pool hand-over"));
    sky.nodes.remove("a");
    sky.write();
    assert_eq!(sky.status(1).node, "b");
}

#[test]
fn a_node_gets_a_limited_number_of_pool_objects() {
    let mut sky = Sky::new();
    let most = u128::try_from(MAX_POOLS).unwrap();
    sky.says("a", (0..most).map(shown).collect());
    sky.write();
    sky.says("a", (1000..1010).map(shown).collect());
    sky.says("b", vec![shown(2000)]);
    let new = sky.changes().into_iter().filter(|change| change.is_new);
    assert_eq!(new.map(|change| change.id).collect::<Vec<_>>(), [id(2000)]);
}

#[test]
fn a_pool_whose_volumes_name_another_home_says_what_to_do() {
    let mut sky = Sky::new();
    let homes = |homes: &[(&str, usize)]| {
        let each = homes.iter().map(|(home, count)| (home.to_string(), *count));
        [(id(1), each.collect())].into()
    };
    sky.homes = homes(&[("home-of-b", 5)]);
    sky.says("b", vec![shown(1), shown(2)]);
    sky.write();
    assert_eq!(sky.status(1).health, Health::Healthy);
    sky.homes = homes(&[("home-of-a", 3), ("home-of-b", 5)]);
    sky.write();
    let status = sky.status(1);
    assert_eq!(status.health, Health::Degraded);
    for words in [
        "3 PersistentVolumes",
        &format!("kubectl slackwater pool follow {}", id(1)),
    ] {
        assert!(status.message.contains(words), "{}", status.message);
    }
    assert_eq!(sky.status(2).health, Health::Healthy);
}

#[test]
fn the_policy_needs_both_gone_for_its_time() {
    let hour = 3600;
    let mut sky = Sky::new();
    sky.lost_after = Some(Duration::from_secs(2 * 3600));
    sky.says("a", vec![shown(1)]);
    sky.write();
    sky.is_silent("a");
    sky.now = 5 * hour;
    sky.write();
    assert!(!sky.pools[&id(1)].spec.lost, "its Node is there");
    sky.nodes.remove("a");
    sky.write();
    assert_eq!(sky.status(1).node_gone_since, Some(Time(time(5 * hour))));
    sky.now = 7 * hour - 1;
    assert_eq!(sky.changes(), []);
    sky.nodes.insert("a".into());
    sky.write();
    assert_eq!(sky.status(1).node_gone_since, None, "it's counted anew");
    sky.nodes.remove("a");
    sky.write();
    sky.now = 9 * hour - 1;
    let changes = sky.write();
    let reason = changes[0].lose.as_deref().unwrap();
    assert!(
        reason.contains("node a") && reason.contains("2 hours"),
        "{reason}"
    );
    assert_eq!(sky.status(1).health, Health::Lost);
    // Without the policy no pool is ever marked as lost.
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    sky.is_silent("a");
    sky.nodes.clear();
    for day in 1..100 {
        sky.now = day * 24 * hour;
        sky.write();
    }
    assert!(!sky.pools[&id(1)].spec.lost);
}

#[test]
fn bytes_are_written_in_three_digits() {
    let cases = [
        (0, "0"),
        (-5, "0"),
        (999, "999"),
        (1000, "0.98Ki"),
        (1536, "1.5Ki"),
        (100 << 30, "100Gi"),
        ((93 << 30) + (1 << 29), "93.5Gi"),
        (1000 << 30, "0.98Ti"),
        (i64::MAX, "8Ei"),
    ];
    for (value, text) in cases {
        assert_eq!(bytes(value), text, "{value}");
    }
}

#[test]
fn every_word_of_health_is_read_back() {
    for health in Health::ALL {
        let text = serde_json::to_value(health).unwrap();
        assert_eq!(text, health.as_str());
        assert_eq!(serde_json::from_value::<Health>(text).unwrap(), health);
    }
    let later = serde_json::from_value::<Health>("Sleeping".into()).unwrap();
    assert_eq!(later, Health::Other, "a later release's word is no error");
}

#[test]
fn pods_that_keep_a_disk_are_named_for_as_long_as_they_do() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    let [known, unknown] = [7, 8].map(|n| uuid::Uuid::from_u128(n).to_string());
    sky.pods.insert(known.clone(), "shop/db-0".into());
    let dead = Shown {
        refusal: "its disk is dead".into(),
        pods: vec![known, unknown.clone()],
        ..shown(1)
    };
    for now in [10, 20, 90] {
        sky.now = now;
        sky.says("a", vec![dead.clone()]);
        sky.write();
        let status = sky.status(1);
        assert_eq!(status.health, Health::NotServed);
        assert_eq!(
            status.message,
            format!("its disk is dead; in use by pods shop/db-0, {unknown}")
        );
    }
    let freed = Shown {
        pods: Vec::new(),
        ..dead
    };
    sky.says("a", vec![freed]);
    sky.write();
    assert_eq!(sky.status(1).message, "its disk is dead");
}

#[test]
fn a_pool_is_evacuated_only_when_nothing_was_found_in_it_since_that_was_asked() {
    let mut sky = Sky::new();
    sky.says("a", vec![on(1, "", false)]);
    sky.write();
    let found = |sky: &Sky| {
        let all = conditions(sky, 1).into_iter();
        let mut all = all.filter(|(type_, ..)| type_ == "Evacuated");
        all.next().map(|(_, status, reason)| (status, reason))
    };
    assert_eq!(found(&sky), None);
    let check = |sky: &mut Sky, generation, left: Result<u64, &str>| {
        let found =
            left.map_err(String::from)
                .map(|left| crate::router::kube::pools::object::Evacuation {
                    left,
                    snapshots: (0..left).map(|n| n.to_string()).collect(),
                    ..Default::default()
                });
        let generation = Some(generation);
        sky.evacuations.insert(id(1), Checked { generation, found });
    };
    let pool = sky.pools.get_mut(&id(1)).unwrap();
    pool.spec.evacuate = true;
    pool.metadata.generation = Some(2);
    // Found before that was asked.
    check(&mut sky, 1, Ok(0));
    let of = |status: &str, reason: &str| Some((status.to_string(), reason.to_string()));
    for (generation, left, expected) in [
        (1, Ok(0), of("False", "Unknown")),
        (2, Err("it is away"), of("False", "Unknown")),
        (2, Ok(3), of("False", "NotEmpty")),
        (2, Ok(0), of("True", "Empty")),
    ] {
        check(&mut sky, generation, left);
        sky.write();
        assert_eq!(found(&sky), expected);
        let shown = sky.status(1).evacuation.as_ref().map(|it| it.left);
        assert_eq!(shown, left.ok().filter(|_| generation == 2));
        assert_eq!(conditions(&sky, 1).len(), 2, "and OwnMount");
    }
    // An agent that is silent is no reason to show what was found before.
    sky.evacuations.clear();
    sky.now += 300;
    sky.is_silent("a");
    sky.write();
    assert_eq!(found(&sky), of("False", "Unknown"));
    sky.pools.get_mut(&id(1)).unwrap().spec.evacuate = false;
    sky.write();
    assert_eq!(
        (found(&sky), sky.status(1).evacuation.clone()),
        (None, None)
    );
}

/// Orphans of a pool that has come to its node lately are not deleted.
#[test]
fn since_when_a_pool_is_in_its_place_begins_again_when_it_may_have_been_elsewhere() {
    let mut sky = Sky::new();
    let placed = |sky: &Sky| sky.status(1).placed_since.as_ref().map(|at| at.0);
    let away = |sky: &mut Sky, seconds: i64| {
        sky.is_silent("a");
        sky.now += 120;
        sky.write();
        assert_eq!(sky.status(1).health, Health::Unreachable);
        sky.now += seconds;
        sky.says("a", vec![shown(1)]);
        sky.write();
        assert_eq!(sky.status(1).health, Health::Healthy);
    };
    sky.says("a", vec![shown(1)]);
    sky.write();
    assert_eq!(placed(&sky), Some(time(0)));
    away(&mut sky, 600);
    assert_eq!(placed(&sky), Some(time(0)));
    away(&mut sky, 7200);
    assert_eq!(placed(&sky), Some(time(sky.now)));
    // Its disk is in another node now.
    sky.now += 600;
    sky.says("a", Vec::new());
    sky.says("b", vec![shown(1)]);
    sky.write();
    assert_eq!(sky.status(1).node, "b");
    assert_eq!(placed(&sky), Some(time(sky.now)));
}

/// A router that has led before another one does not write an older check over a newer one.
#[test]
fn an_older_check_of_orphans_is_not_written() {
    let mut sky = Sky::new();
    sky.says("a", vec![shown(1)]);
    sky.write();
    let check = |at: i64, count: u64| {
        let checked = Time(time(at));
        let orphans = PoolOrphans {
            checked: checked.clone(),
            count,
            listed: Vec::new(),
        };
        (checked, Some(orphans))
    };
    let count_after = |sky: &mut Sky, at: i64, count: u64| {
        sky.now += 100;
        sky.says("a", vec![shown(1)]);
        sky.orphans = [(id(1), check(at, count))].into();
        sky.write();
        sky.status(1).orphans.as_ref().map(|orphans| orphans.count)
    };
    assert_eq!(count_after(&mut sky, 10, 3), Some(3));
    assert_eq!(count_after(&mut sky, 5, 7), Some(3));
    assert_eq!(count_after(&mut sky, 20, 7), Some(7));
}

/// The samples need no writes of their own, and a pool that is away keeps those that it has.
#[test]
fn the_usage_of_a_pool_is_sampled_once_an_hour() {
    let mut sky = Sky::new();
    for minute in 0..150 {
        sky.now = minute * 60;
        sky.says("a", vec![shown(1)]);
        sky.write();
    }
    let times = |sky: &Sky| -> Vec<i64> {
        let samples = sky.status(1).usage.iter();
        samples.map(|one| one.time.0.as_second()).collect()
    };
    let expected = [0, 3600, 7200].map(|at| time(at).as_second());
    assert_eq!(times(&sky), expected);
    let status = sky.status(1);
    let used = status.total_bytes - status.available_bytes;
    assert_eq!(status.used_bytes(), used);
    assert!(status.usage.iter().all(|one| one.used_bytes == used));
    sky.is_silent("a");
    sky.now += 7200;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
    assert_eq!(times(&sky), expected);
}

#[test]
fn a_pool_that_fills_shows_when_it_is_full() {
    let with = |used: i64| Shown {
        total_bytes: 10 << 30,
        available_bytes: (10 - used) << 30,
        ..shown(1)
    };
    let mut sky = Sky::new();
    sky.says("a", vec![with(2)]);
    sky.write();
    assert_eq!(sky.status(1).full_at, None, "nothing is known of its rate");
    sky.now = 7200;
    sky.says("a", vec![with(4)]);
    // 2 GiB in two hours, and 6 are free.
    let full = Some(Time(time(7200 + 6 * 3600)));
    sky.write();
    assert_eq!(sky.status(1).full_at, full);
    // Alone it is no reason to write: the CRD of the previous release does not have it.
    sky.now += 30;
    sky.says("a", vec![with(4)]);
    assert_eq!(sky.changes(), []);
    sky.is_silent("a");
    sky.now += 7200;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
    assert_eq!(sky.status(1).full_at, None, "nothing is known of it now");
}

#[test]
fn numbers_of_an_agent_that_cannot_be_are_no_fault_of_the_router() {
    let mut sky = Sky::new();
    let strange = Shown {
        total_bytes: i64::MAX,
        available_bytes: i64::MIN,
        ..shown(1)
    };
    sky.says("a", vec![strange]);
    sky.write();
    assert_eq!(sky.status(1).usage[0].used_bytes, i64::MAX);
    sky.now = 7200;
    sky.write();
    assert_eq!(sky.status(1).full_at, None);
}
