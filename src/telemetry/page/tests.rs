//! The page of many states of a cluster, and the server in front of it.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::world::{
    Agent, Claim, Cut, CutState, Cuts, Frozen, Grown, Growth, Images, Pool, Schedule, Work,
};
use super::*;

mod frozen;
mod images;
mod lanes;
mod work;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn ago(minutes: i64) -> Timestamp {
    now() - SignedDuration::from_mins(minutes)
}

fn empty() -> World {
    World {
        now: now(),
        driver: "csi.slackwater.dev".into(),
        namespace: "slackwater".into(),
        router: "router-1".into(),
        problem: None,
        pools: Vec::new(),
        agents: Vec::new(),
        claims: Vec::new(),
        schedules: Some(Vec::new()),
        cuts: Cuts::default(),
        work: Vec::new(),
        work_problem: None,
    }
}

fn pool(number: usize, node: &str) -> Pool {
    Pool {
        id: format!("11111111-2222-4333-8444-{number:012}"),
        name: "default".into(),
        node: node.into(),
        health: "Healthy",
        is_well: true,
        since: Some(ago(600)),
        seen: Some(ago(1)),
        total_bytes: 100 << 30,
        available_bytes: 60 << 30,
        promised_bytes: 50 << 30,
        volumes: 2,
        snapshots: 3,
        ..Pool::default()
    }
}

fn frozen(volume: &str, minutes: i64) -> Frozen {
    Frozen {
        volume: volume.into(),
        claim: None,
        since: ago(minutes),
        until: ago(minutes - 30),
        is_held: true,
    }
}

fn grown(volume: &str, bytes: u64) -> Grown {
    Grown {
        volume: volume.into(),
        claim: None,
        bytes,
        since: ago(600),
    }
}

fn growth(volumes: Vec<Grown>) -> Option<Growth> {
    let measured = ago(20);
    Some(Growth { measured, volumes })
}

fn agent(node: &str) -> Agent {
    Agent {
        node: node.into(),
        version: "0.1.0".into(),
        seen: Some(ago(0)),
        has_guard: true,
        ..Agent::default()
    }
}

/// A cluster in which nothing is wrong.
fn well(nodes: usize, claims: usize) -> World {
    let names: Vec<String> = (0..nodes).map(|n| format!("node-{n}")).collect();
    let pools: Vec<Pool> = (0..).zip(&names).map(|(n, node)| pool(n, node)).collect();
    let claim = |n: usize| Claim {
        name: format!("shop/data-{n}"),
        pool: pools[n % pools.len()].id.clone(),
    };
    World {
        agents: names.iter().map(|node| agent(node)).collect(),
        claims: (0..claims).map(claim).collect(),
        pools,
        ..empty()
    }
}

fn schedule() -> Schedule {
    Schedule {
        namespace: "shop".into(),
        name: "pg".into(),
        uid: "u".into(),
        is_group: true,
        timetable: "every 1h".into(),
        last_cut: Some(ago(30)),
        level: Some("application".into()),
        ..Schedule::default()
    }
}

fn cut(minutes: i64, level: &str) -> Cut {
    Cut {
        namespace: "shop".into(),
        name: format!("pg-{minutes}"),
        schedule: Some("u".into()),
        at: ago(minutes),
        level: Some(level.into()),
        frozen_ms: Some(12),
        held_ms: (level == "application").then_some(210),
        ..Cut::default()
    }
}

fn page(world: &World, search: &str) -> String {
    html::render(&view(world, search)).unwrap()
}

#[test]
fn a_cluster_in_which_nothing_is_wrong_says_so_first() {
    let world = well(3, 10);
    let shown = view(&world, "");
    assert_eq!(shown.problems.count, 0, "{:?}", shown.problems.first);
    let text = page(&world, "");
    let state = text.find("Nothing is wrong, as far as").unwrap();
    assert!(state < text.find("<main>").unwrap());
    assert_eq!(shown.nodes.first[0].claims, 4, "with most to lose");
    assert_eq!(shown.nodes.first[0].snapshots, 3);
}

#[test]
fn a_pool_that_fills_up_is_a_problem_a_day_before_it_is_full() {
    let ahead = |hours: i64, free: u64| {
        let mut world = well(2, 0);
        world.pools[0].full_at = Some(ago(-60 * hours));
        world.pools[0].available_bytes = free << 30;
        world
    };
    let problems = |world: &World| view(world, "").problems.first;
    let soon = ahead(5, 30);
    let text =
        "pool default of node node-0 will be full in 5 h, if it fills as it did in the last day";
    assert_eq!(problems(&soon)[0].text, text);
    assert!(page(&soon, "").contains(">5 h</time>"));
    for well in [ahead(30, 30), ahead(5, 50)] {
        assert!(problems(&well).is_empty(), "{:?}", problems(&well));
        assert!(page(&well, "").contains(" h</time>"));
    }
    let mut stale = soon;
    stale.pools[0].seen = Some(ago(60));
    assert!(!page(&stale, "").contains(">5 h</time>"));
}

#[test]
fn the_worst_and_oldest_problem_is_first_with_its_command() {
    let mut world = well(4, 0);
    world.pools[0].available_bytes = 1 << 30;
    world.pools[1].is_well = false;
    world.pools[1].health = "NotServed";
    world.pools[1].message = "its disk is missing".into();
    world.pools[1].since = Some(ago(30));
    world.agents[2].problem = Some("connection refused".into());
    world.agents[2].seen = Some(ago(90));
    world.agents[3].has_guard = false;
    world.schedules = Some(vec![Schedule {
        overdue: Some(ago(60)),
        ..schedule()
    }]);
    world.work = vec![Work {
        resource: "volumemoves",
        namespace: "shop".into(),
        name: "away".into(),
        what: "move of claim shop/data".into(),
        message: "no space".into(),
        failing: Some(ago(5)),
        ..Work::default()
    }];
    let shown = view(&world, "").problems.first;
    let lines = shown.iter().map(|one| {
        let since = one.since.as_ref().map_or("-", |since| since.age.as_str());
        let command = one.command.as_deref().unwrap_or("-");
        format!("{} | {since} | {command}", one.text)
    });
    insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
    let text = page(&world, "");
    assert!(text.contains("6 things are wrong."), "{text}");
    assert!(text.contains("<code>kubectl describe pools.slackwater.dev/11111111"));
}

#[test]
fn stale_data_is_never_shown_as_healthy() {
    let mut world = well(2, 0);
    world.pools[0].seen = Some(ago(4));
    world.pools[1].seen = None;
    let shown = view(&world, "");
    assert_eq!(shown.problems.count, 2);
    for pool in &shown.pools.first {
        assert!(pool.is_stale && !pool.is_well, "{pool:?}");
    }
    let text = page(&world, "");
    assert_eq!(text.matches("<tr class=\"stale\">").count(), 2);
    assert!(text.contains("outdated</span>, was Healthy <span class=\"quiet\">(4 min ago)"));
    // One that was reported in time is not.
    world.pools[0].seen = Some(ago(3));
    assert_eq!(view(&world, "").problems.count, 1);
}

#[test]
fn nothing_is_well_while_objects_cannot_be_read() {
    let mut world = well(2, 0);
    world.problem = Some("watching Pools has failed for 90 s".into());
    let shown = view(&world, "");
    assert!(shown.is_outdated);
    let mut pools = shown.pools.first.iter();
    assert!(pools.all(|pool| pool.is_stale && !pool.is_well));
    assert_eq!(shown.headline, "The state is not known completely.");
    let command = shown.problems.first[0].command.as_deref();
    let expected = "kubectl --namespace slackwater logs router-1 --container router";
    assert_eq!(command, Some(expected));
    let text = page(&world, "");
    assert!(!text.contains("Nothing is wrong"), "{text}");
    assert_eq!(text.matches("<section aria-labelledby").count(), 5);
    assert_eq!(text.matches(" class=\"stale\">\n<h2").count(), 5);
}

#[test]
fn a_pool_that_is_lost_is_no_problem_and_has_no_node() {
    let mut world = well(1, 5);
    world.pools[0].is_gone = true;
    world.pools[0].is_well = false;
    world.pools[0].seen = Some(ago(10_000));
    let shown = view(&world, "");
    assert_eq!(shown.problems.count, 0);
    assert!(!shown.pools.first[0].is_well);
    assert_eq!(shown.nodes.first[0].claims, 0, "they are lost already");
}

const HOSTILE: &str = "<script>alert(1)</script>\" onload='x' &amp; {{7*7}} \u{202e}\u{1b}[2J";

/// A pool in which every text is this one.
fn pool_of(text: &str) -> Pool {
    let texts = || text.to_string();
    Pool {
        id: texts(),
        name: texts(),
        node: texts(),
        message: texts(),
        frozen: vec![Frozen {
            claim: Some(texts()),
            ..frozen(text, 3)
        }],
        growth: growth(vec![Grown {
            claim: Some(texts()),
            ..grown(text, 1)
        }]),
        images: Some(Images::default()),
        is_well: false,
        health: "Degraded",
        ..pool(0, text)
    }
}

/// A state in which every text is this one.
fn all_of(text: &str) -> World {
    let texts = || text.to_string();
    let mut world = well(1, 0);
    world.driver = texts();
    world.namespace = texts();
    world.problem = Some(texts());
    world.pools[0] = pool_of(text);
    world.agents[0] = Agent {
        version: texts(),
        problem: Some(texts()),
        missing: vec![texts()],
        ..agent(text)
    };
    world.claims = vec![Claim {
        name: texts(),
        pool: texts(),
    }];
    world.schedules = Some(vec![Schedule {
        namespace: texts(),
        name: texts(),
        uid: texts(),
        timetable: texts(),
        level: Some(texts()),
        next_slot: Some(texts()),
        overdue: Some(ago(3)),
        skipped: vec![ago(4)],
        failing: vec![(ago(2), texts())],
        ..schedule()
    }]);
    let cut = Cut {
        namespace: texts(),
        name: texts(),
        schedule: Some(texts()),
        error: Some(texts()),
        state: CutState::Failed,
        ..cut(5, text)
    };
    let single = Cut {
        claim: Some(texts()),
        ..cut.clone()
    };
    world.cuts = Cuts {
        all: vec![cut, single],
        problem: Some(texts()),
        is_cut_off: true,
    };
    world.work = vec![Work {
        resource: "volumemoves",
        namespace: texts(),
        name: texts(),
        what: texts(),
        phase: texts(),
        message: texts(),
        failing: Some(ago(1)),
        since: Some(ago(9)),
        reported: Some(ago(8)),
        volumes: Some((1, 2)),
        done_bytes: 1,
        total_bytes: 2,
        pools: vec![texts()],
        deadline: Some(ago(-7)),
        ..Work::default()
    }];
    world.work_problem = Some(texts());
    world
}

/// What a browser would take from the page besides text: names of elements, and their attributes.
fn markup(page: &str) -> Vec<String> {
    let tags = page.split('<').skip(1);
    let tags = tags.filter_map(|rest| rest.split('>').next());
    let each = tags.flat_map(|tag| {
        let outside = tag.split('"').step_by(2).collect::<String>();
        let words: Vec<String> = outside.split_whitespace().map(String::from).collect();
        words
    });
    let mut all: Vec<String> = each.collect();
    all.sort();
    all.dedup();
    all
}

#[test]
fn hostile_names_are_text_on_the_page() {
    let (plain, hostile) = (all_of("name"), all_of(HOSTILE));
    let text = page(&hostile, HOSTILE);
    assert!(text.matches("&#60;script&#62;").count() > 20, "{text}");
    assert_eq!(markup(&text), markup(&page(&plain, "name")));
    for never in [
        "<script",
        "\u{1b}",
        "\u{202e}",
        " style=",
        "javascript:",
        " on",
    ] {
        let found = text
            .split('<')
            .skip(1)
            .filter_map(|rest| rest.split('>').next());
        let mut outside = found.map(|tag| tag.split('"').step_by(2).collect::<String>());
        assert!(
            !outside.any(|tag| format!("<{tag}").contains(never)),
            "{never:?}"
        );
    }
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'));
    let shown = view(&hostile, "");
    // Commands are left out, because they would not be what they seem, except for one without a name.
    let commands = shown.problems.first.iter();
    let commands: Vec<_> = commands.filter_map(|one| one.command.as_deref()).collect();
    assert_eq!(commands, ["kubectl slackwater frozen"]);
}

proptest! {
    #[test]
    fn no_text_changes_the_markup(text in "\\PC{1,40}") {
        let without_commands = |text: &str| {
            let mut found = markup(&page(&all_of(text), text));
            found.retain(|word| word != "code" && word != "/code");
            found
        };
        prop_assert_eq!(without_commands(&text), without_commands("name"));
    }

    #[test]
    fn any_query_is_a_search(query in ".{0,600}") {
        prop_assert!(search(&query).chars().count() <= MAX_SEARCH);
    }
}

#[test]
fn the_search_is_in_the_url() {
    assert_eq!(search("q=a+b%2Fc%"), "a b/c%");
    assert_eq!(search("x=1&q=%F0%9F%9A%80"), "\u{1f680}");
    assert_eq!(search("%q=1"), "");
    let world = well(30, 100);
    let shown = view(&world, " NODE-29 ");
    assert_eq!((shown.pools.count, shown.nodes.count), (1, 1));
    assert_eq!(shown.claims.count, 3);
    assert!(
        shown
            .claims
            .first
            .iter()
            .all(|claim| claim.node == "node-29")
    );
    assert_eq!(view(&world, "shop/data-7").claims.count, 11, "7, 70 to 79");
    assert_eq!(
        view(&world, "").claims.count,
        0,
        "without a search none is listed"
    );
    assert!(page(&world, "a&b").contains("/status.json?q=a%26b\""));
}

#[test]
fn the_size_of_the_page_does_not_grow_with_the_cluster() {
    let sizes = |claims: usize, search: &str| {
        let mut world = well(200, claims);
        let many = |n: usize| Schedule {
            name: format!("pg-{n:05}"),
            uid: format!("u-{n}"),
            overdue: Some(ago(60)),
            skipped: (0..n as i64 % 90).map(ago).collect(),
            failing: vec![(ago(9), "x".repeat(40_000)); 50],
            ..schedule()
        };
        world.schedules = Some((0..claims / 100).map(many).collect());
        let cut = |n: usize| Cut {
            schedule: Some(format!("u-{}", n % 50)),
            claim: (!n.is_multiple_of(3)).then(|| format!("data-{n:05}")),
            ..cut(60 + (n % 1000) as i64, "crash")
        };
        world.cuts.all = (0..claims).map(cut).collect();
        for pool in &mut world.pools {
            let volume = |n: usize| frozen(&format!("{}.{n:06}", pool.id), 7);
            pool.frozen = (0..claims / 100).map(volume).collect();
            let volume = |n: usize| grown(&format!("{}.{n:06}", pool.id), 1 << 30);
            pool.growth = growth((0..claims / 100).map(volume).collect());
            pool.images = Some(Images::default());
        }
        let running = |n: usize| Work {
            resource: ["volumemoves", "pools", "httpsources"][n % 3],
            namespace: "shop".into(),
            name: format!("work-{n:06}"),
            what: "claim shop/data is filled".repeat(20),
            message: "x".repeat(40_000),
            volumes: Some((1, 2)),
            pools: world.pools.iter().map(|pool| pool.id.clone()).collect(),
            ..work::copy()
        };
        world.work = (0..claims / 10).map(running).collect();
        world.work_problem = Some("x".repeat(40_000));
        let shown = view(&world, search);
        let json = json(&shown).unwrap();
        let started_at = Instant::now();
        let page = html::render(&shown).unwrap();
        let rendered = started_at.elapsed();
        let started_at = Instant::now();
        let _ = serde_json::to_string(&shown).unwrap();
        eprintln!(
            "{claims} volumes: {} bytes of HTML in {rendered:?}, {} bytes of JSON in {:?}",
            page.len(),
            json.len(),
            started_at.elapsed()
        );
        (page.len(), json.len())
    };
    for search in ["", "shop"] {
        let (few, many) = (sizes(4_000, search), sizes(20_000, search));
        // Numbers and names have more digits.
        assert!(many.0 < few.0 + 2_000, "{search:?}: {few:?}, {many:?}");
        assert!(many.1 < few.1 + 2_000, "{search:?}: {few:?}, {many:?}");
        assert!(many.0 < 1 << 20, "{many:?}");
    }
}

#[test]
fn the_time_left_of_a_copy_follows_from_its_rate() {
    let copy = Work {
        resource: "volumemoves",
        done_bytes: 1 << 30,
        total_bytes: 4 << 30,
        copying_since: Some(ago(10)),
        ..Work::default()
    };
    let left = |work: Work| {
        let world = World {
            work: vec![work],
            ..empty()
        };
        view(&world, "").work.first[0].left_seconds
    };
    assert_eq!(left(copy.clone()), Some(30 * 60));
    let unknown = Work {
        copying_since: None,
        ..copy.clone()
    };
    assert_eq!(left(unknown), None);
    let unbegun = Work {
        done_bytes: 0,
        ..copy.clone()
    };
    assert_eq!(left(unbegun), None);
    let done = Work {
        total_bytes: 1,
        ..copy
    };
    assert_eq!(left(done), None, "a volume that has shrunk");
    let revert = Work {
        resource: "volumereverts",
        deadline: Some(ago(-9)),
        ..Work::default()
    };
    let world = World {
        work: vec![revert],
        ..empty()
    };
    let text = page(&world, "");
    assert!(
        text.contains("9 min</time> until it fails, unless"),
        "{text}"
    );
}

/// Counts how often it is read.
#[derive(Default)]
struct Counted(AtomicUsize);

impl Source for Counted {
    fn world(&self) -> Pin<Box<dyn Future<Output = World> + Send + '_>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { well(2, 3) })
    }
}

async fn started() -> (SocketAddr, Arc<Counted>) {
    let listener = listen(0).await.unwrap();
    let address = listener.local_addr().unwrap();
    assert!(address.ip().is_loopback());
    let source = Arc::new(Counted::default());
    tokio::spawn(serve(listener, source.clone(), std::future::pending()));
    (address, source)
}

async fn ask(address: SocketAddr, head: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{head}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer)
}

#[tokio::test]
async fn only_local_hosts_are_answered() {
    let (address, source) = started().await;
    let get = |host: &str| format!("GET / HTTP/1.1\r\nhost: {host}");
    for host in [
        "localhost",
        "LOCALHOST:9830",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]",
        "[::1]:9830",
    ] {
        assert_eq!(ask(address, &get(host)).await.0, 200, "{host}");
    }
    let asked = source.0.load(Ordering::Relaxed);
    for host in [
        "",
        "example.org",
        "localhost.example.org",
        "127.0.0.1.example.org:9830",
        "127.0.0.2",
        "localhost:x",
        "::1",
        "0.0.0.0",
        "localhost\r\nhost: example.org",
        "localhost@example.org",
    ] {
        let (status, text) = ask(address, &get(host)).await;
        assert!(status == 403 || status == 400, "{host}: {text}");
        assert!(!text.contains("csi.slackwater.dev"), "{host}");
    }
    let absolute = "GET http://example.org/ HTTP/1.1\r\nhost: localhost";
    assert_eq!(ask(address, absolute).await.0, 403);
    assert_eq!(
        ask(address, "GET / HTTP/1.0").await.0,
        403,
        "without a host"
    );
    assert_eq!(
        source.0.load(Ordering::Relaxed),
        asked,
        "nothing is read for them"
    );
}

#[tokio::test]
async fn every_answer_has_the_headers_and_nothing_can_be_written() {
    let (address, source) = started().await;
    for (line, status) in [
        ("GET /", 200),
        ("GET /?q=node-1", 200),
        ("GET /status.json", 200),
        ("GET /status.css", 200),
        ("GET /icon.svg", 200),
        ("GET /metrics", 404),
        ("GET /../etc/passwd", 404),
        ("POST /", 405),
        ("DELETE /", 405),
        ("OPTIONS /", 405),
        ("HEAD /", 200),
    ] {
        let (found, text) = ask(address, &format!("{line} HTTP/1.1\r\nhost: localhost")).await;
        assert_eq!(found, status, "{line}: {text}");
        for (name, value) in HEADERS {
            assert!(
                text.contains(&format!("{name}: {value}\r\n")),
                "{line}: {text}"
            );
        }
        let body = text.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(body.is_empty(), line.starts_with("HEAD"), "{line}");
    }
    assert!(HEADERS[0].1.contains("default-src 'none'"));
    assert!(HEADERS[0].1.contains("frame-ancestors 'none'") && !HEADERS[0].1.contains("unsafe"));
    assert_eq!(
        source.0.load(Ordering::Relaxed),
        1,
        "requests share what is read"
    );
    let (_, text) = ask(
        address,
        "GET /status.json?q=node-1 HTTP/1.1\r\nhost: localhost",
    )
    .await;
    let json: serde_json::Value =
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(json["nodes"]["first"][0]["node"], "node-1");
    assert_eq!(json["nodes"]["count"], 1);
}

#[tokio::test]
async fn what_was_read_is_not_kept_without_requests() {
    let source = Arc::new(Counted::default());
    let page = Arc::new(Page {
        source: source.clone(),
        max_age: Duration::from_millis(1),
        read: Mutex::default(),
    });
    let world = page.world().await;
    // For ever, unless it is forgotten.
    while Arc::strong_count(&world) > 1 || page.read.lock().await.is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(source.0.load(Ordering::Relaxed), 1);
}

/// What a page needs to be read by a screen reader, on a narrow screen and without JavaScript.
#[test]
fn drawings_have_labels_and_tables_and_the_style_has_both_schemes() {
    let text = page(&all_of("name"), "name");
    for drawing in text.split("<svg").skip(1) {
        let tag = drawing.split('>').next().unwrap();
        let is_labeled = tag.contains("role=\"img\" aria-label=\"") || tag.contains("aria-hidden");
        assert!(is_labeled, "{tag}");
    }
    assert_eq!(
        text.matches("class=\"lane\"").count(),
        text.matches("<details>").count()
    );
    assert!(text.contains("<html lang=\"en\">") && text.contains("name=\"viewport\""));
    assert!(text.contains("<label for=\"q\">") && text.contains("id=\"q\""));
    let headings = text.matches("<th ").count();
    assert_eq!(text.matches("<th scope=\"col\"").count(), headings);
    for expected in [
        "prefers-color-scheme: dark",
        "max-width: 40rem",
        ":focus-visible",
    ] {
        assert!(html::STYLE.contains(expected), "{expected}");
    }
    assert!(!html::STYLE.contains("url(") && !html::STYLE.contains("@import"));
}

/// The relative luminance of a color, as WCAG defines it.
fn luminance(color: &str) -> f64 {
    let part = |at: usize| {
        let value = u8::from_str_radix(&color[at..at + 2], 16).unwrap();
        let value = f64::from(value) / 255.0;
        match value <= 0.04045 {
            true => value / 12.92,
            false => ((value + 0.055) / 1.055).powf(2.4),
        }
    };
    0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
}

#[test]
fn texts_and_shapes_have_enough_contrast_in_both_schemes() {
    let blocks: Vec<&str> = html::STYLE.split(":root {").skip(1).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        let color = |name: &str| {
            let rest = block.split(&format!("--{name}: ")).nth(1).unwrap();
            luminance(&rest[..7])
        };
        let contrast = |one: &str, other: &str| {
            let (one, other) = (color(one), color(other));
            (one.max(other) + 0.05) / (one.min(other) + 0.05)
        };
        for text in ["text", "quiet", "link", "bad", "good"] {
            assert!(contrast(text, "back") >= 4.5, "{text}");
        }
        for text in ["text", "quiet"] {
            assert!(contrast(text, "field") >= 4.5, "{text} on a field");
            assert!(contrast(text, "bad-back") >= 4.5, "{text} of a problem");
        }
        for shape in ["application", "filesystem", "crash", "unknown", "bad"] {
            assert!(contrast(shape, "field") >= 3.0, "{shape}");
        }
        let parts = ["own", "shared", "snapshots", "undivided", "other"];
        for part in parts.into_iter().chain(["used", "promised"]) {
            assert!(
                contrast(part, "back") >= 3.0 && contrast(part, "free") >= 2.0,
                "{part}"
            );
        }
    }
}
