//! The dashboard: every query of every panel returns series in a real Prometheus that scrapes drivers and
//! a router, with the expected values. Prometheus comes from its package (`tests/packages/get`).

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use slackwater::csi;
use slackwater::operation::CutCounts;
use slackwater::telemetry::populations::Count;
use slackwater::telemetry::router::{
    AgentStatus, ClusterStatus, Orphans, RouterView, ScheduleStatus,
};
use slackwater::telemetry::volumes::VolumeClaim;
use slackwater::telemetry::{Metrics, http};
use slackwater_testkit::cluster::Process;
use slackwater_testkit::packages;
use slackwater_testkit::prometheus::{Prometheus, Series};
use slackwater_testkit::{
    Client, Scratch, Server, WAIT_TIMEOUT, eventually, free_port, mount, slackwater,
};

use super::{alerts, chart, read, rendered};

const MIB: u64 = 1 << 20;
const FILE: &str = "dashboards/slackwater.json";

fn dashboard() -> Value {
    serde_json::from_str(&read(FILE)).expect("JSON")
}

/// The panels, without rows.
fn panels() -> Vec<Value> {
    let all = dashboard()["panels"].as_array().expect("panels").clone();
    let panels: Vec<_> = all.into_iter().filter(|one| one["type"] != "row").collect();
    assert!(panels.len() > 30, "the panels are found");
    panels
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// An expression with the values that Grafana gives to the variables where all are selected.
fn substituted(expression: &str) -> String {
    let mut found = expression.replace("$__rate_interval", "1m");
    for variable in dashboard()["templating"]["list"]
        .as_array()
        .expect("a list")
    {
        let name = format!("${}", text(&variable["name"]));
        found = found.replace(&name, text(&variable["allValue"]));
    }
    assert!(!found.contains('$'), "an unknown variable: {found}");
    found
}

#[test]
fn the_dashboard_is_found_by_grafana() {
    let found = dashboard();
    assert_eq!(found["uid"], "slackwater", "links to it stay valid");
    assert_eq!(found["templating"]["list"][0]["type"], "datasource");
    for panel in panels() {
        let title = text(&panel["title"]).to_string();
        assert!(text(&panel["description"]).ends_with('.'), "{title}");
        let targets = panel["targets"].as_array().expect("queries").iter();
        let sources = targets
            .map(|one| &one["datasource"])
            .chain([&panel["datasource"]]);
        for source in sources {
            assert_eq!(source["uid"], "${datasource}", "{title}");
        }
        assert!(
            !text(&panel["fieldConfig"]["defaults"]["unit"]).is_empty(),
            "{title}"
        );
    }
    let words = [
        "--set=metrics.dashboard.create=true,metrics.dashboard.namespace=monitoring,metrics.dashboard.folder=Disks",
        "--show-only=templates/dashboard.yaml",
    ];
    let Some(output) = rendered(&words) else {
        return;
    };
    let map = String::from_utf8(output.stdout).expect("text");
    for line in [
        "kind: ConfigMap",
        "  namespace: monitoring",
        "    grafana_dashboard: \"1\"",
        "  annotations: {grafana_folder: \"Disks\"}",
    ] {
        assert!(map.lines().any(|one| one == line), "no {line} in\n{map}");
    }
    let (_, json) = map.split_once("  slackwater.json: |\n").expect("the file");
    let json: Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(json, found);
    assert!(chart().join(FILE).metadata().expect("a file").len() < 500_000);
}

#[test]
fn the_manual_lists_the_panels() {
    const BEGIN: &str = "<!-- panels: UPDATE_DOCS=1 writes this table from the dashboard -->\n";
    const END: &str = "<!-- end -->";
    let mut table = String::from("| row | panel | shows |\n|---|---|---|\n");
    let mut row = String::new();
    for panel in dashboard()["panels"].as_array().expect("panels") {
        let title = text(&panel["title"]);
        match text(&panel["type"]) {
            "row" => row = title.to_string(),
            _ => table += &format!("| {row} | {title} | {} |\n", text(&panel["description"])),
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let page = fs::read_to_string(&path).expect("the page");
    let (before, rest) = page.split_once(BEGIN).expect("the begin of the table");
    let (now, after) = rest.split_once(END).expect("its end");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, format!("{before}{BEGIN}{table}{END}{after}")).expect("written");
    } else {
        assert_eq!(now, table, "docs/metrics.md is old: run with UPDATE_DOCS=1");
    }
}

/// The leading router of a cluster, whose numbers no router without an API server has.
struct Leader {
    cuts: CutCounts,
    /// The volume of shop/data, and one that two claims name, as while a volume gets a new claim.
    volumes: [String; 2],
}

impl RouterView for Leader {
    fn agents(&self) -> Vec<AgentStatus> {
        vec![AgentStatus {
            node: "node-9".into(),
            up: false,
            silent: Some(Duration::from_secs(700)),
            pools: 1,
            pools_of_other_nodes: 0,
            refused: 0,
        }]
    }

    fn volume_claims(&self) -> Option<Vec<VolumeClaim>> {
        let [one, two] = &self.volumes;
        let claim = |(volume, claim): (&String, &str)| VolumeClaim {
            volume: volume.clone(),
            namespace: "shop".into(),
            claim: claim.into(),
        };
        let claims = [(one, "data"), (two, "old"), (two, "new")];
        Some(claims.into_iter().map(claim).collect())
    }

    fn cluster(&self) -> Option<ClusterStatus> {
        let schedule = ScheduleStatus {
            last_cut: Some(1_700_000_000),
            overdue_seconds: 90,
            missed: 3,
            failing: vec!["Retention".into()],
        };
        Some(ClusterStatus {
            leads: true,
            orphans: Some(Orphans {
                volumes: 3,
                snapshots: Some(1),
            }),
            pools: Some([("Degraded", 6), ("Healthy", 2)].into()),
            moves: Some([("Waiting", 2)].into()),
            reverts: Some([("Failed", 5)].into()),
            quarantined: Some(4),
            schedules: Some([("shop/pg".to_string(), schedule)].into()),
            ..ClusterStatus::default()
        })
    }

    fn cuts(&self) -> &CutCounts {
        &self.cuts
    }

    fn missing(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Serves the metrics of a leader, which knows the claims of these volumes.
async fn leader(volumes: [String; 2]) -> SocketAddr {
    let metrics = Arc::new(Metrics::new());
    let leader = Leader {
        cuts: CutCounts::default(),
        volumes,
    };
    metrics.router().observe(Arc::new(leader));
    metrics.show_certificate(|| Some(4_000_000_000));
    let claim = Count {
        phase: "Populating",
        received: 9,
        expected: 20,
    };
    metrics.populations().set([claim].into_iter());
    let listener = http::listen("127.0.0.1:0".parse().expect("an address")).await;
    let listener = listener.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(http::serve(listener, metrics, std::future::pending()));
    address
}

/// A driver alone on its node, and a router with one agent.
struct Drivers {
    alone: Server,
    _agent: Server,
    _router: Process,
    /// Of the router.
    controller: Client,
    /// Where each has its metrics.
    addresses: [String; 3],
    kubelet: std::path::PathBuf,
    _scratch: [Scratch; 3],
}

impl Drivers {
    fn start() -> Drivers {
        let scratch = [Scratch::new(), Scratch::new(), Scratch::new()];
        let addresses = [(); 3].map(|()| format!("127.0.0.1:{}", free_port()));
        let pools = ["default=memory:", "thin=memory-thin:"];
        let flags = [
            "--metrics-address",
            &addresses[0],
            "--role",
            "all",
            "--metrics-per-volume",
        ];
        let alone = Server::spawn(&scratch[0], &pools, &flags, &[]);
        let tls = scratch[1].join("tls");
        let tls = tls.to_str().expect("text");
        let made = slackwater()
            .args(["certificates", "--out", tls, "--node", "node-2"])
            .output()
            .expect("the program starts");
        assert!(made.status.success(), "{made:?}");
        let file = |name: &str| format!("{tls}/{name}");
        let (crt, key, ca) = (
            file("node-node-2.crt"),
            file("node-node-2.key"),
            file("ca.crt"),
        );
        let flags = [
            ["--metrics-address", &addresses[1]],
            ["--role", "node"],
            ["--node-name", "node-2"],
            ["--agent-listen", "127.0.0.1:0"],
            ["--tls-cert", &crt],
            ["--tls-key", &key],
            ["--tls-ca", &ca],
        ];
        let agent = Server::spawn(&scratch[1], &["default=memory:"], flags.as_flattened(), &[]);
        alone.wait_ready();
        agent.wait_ready();
        let log = agent.log();
        let (_, at) = log
            .split_once("listening for the controller address=")
            .expect("it listens");
        let at = at.split_whitespace().next().expect("an address");
        let socket = scratch[2].dir("csi").join("csi.sock");
        let words = [
            "serve".into(),
            "--role=controller".into(),
            format!("--endpoint=unix://{}", socket.display()),
            format!("--agent=node-2={at}"),
            format!("--tls-cert={}", file("controller.crt")),
            format!("--tls-key={}", file("controller.key")),
            format!("--tls-ca={ca}"),
            format!("--metrics-address={}", addresses[2]),
        ];
        let router = Process::start(&words, &[], &scratch[2].join("log"));
        Drivers {
            controller: Client::new(&socket),
            kubelet: scratch[0].join("kubelet"),
            alone,
            _agent: agent,
            _router: router,
            addresses,
            _scratch: scratch,
        }
    }

    /// Two volumes, one of them with a snapshot that stays, and one of the router.
    async fn fill(&self) -> [String; 2] {
        let client = self.alone.client();
        let id = client
            .create("v1", 64 * MIB, mount("ext4"), &[])
            .await
            .expect("a volume");
        let other = client
            .create("v2", 64 * MIB, mount("ext4"), &[])
            .await
            .expect("a volume");
        let (staging, target) = (self.kubelet.join("staging"), self.kubelet.join("target"));
        client
            .stage(&id, &staging, mount("ext4"))
            .await
            .expect("staged");
        let published = client
            .publish(&id, &staging, &target, mount("ext4"), false)
            .await;
        published.expect("published");
        client.snapshot("kept", &id, &[]).await.expect("a snapshot");
        while !self.controller.is_ready().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let created = self
            .controller
            .create("v3", 64 * MIB, mount("ext4"), &[])
            .await;
        created.expect("a volume of the router");
        [id, other]
    }

    /// A cut, a failed call, and one through the router: rates need more than one of each.
    async fn work(&self, volume: &str, round: u32) {
        let client = self.alone.client();
        let cut = client
            .snapshot(&format!("s{round}"), volume, &[])
            .await
            .expect("a snapshot");
        let request = csi::DeleteSnapshotRequest {
            snapshot_id: cut.snapshot_id,
            ..Default::default()
        };
        client
            .controller()
            .delete_snapshot(request)
            .await
            .expect("deleted");
        let wrong = client
            .create("wrong", MIB, mount("ext4"), &[("nonsense", "1")])
            .await;
        assert_eq!(
            wrong.expect_err("refused").code(),
            tonic::Code::InvalidArgument
        );
        let again = self
            .controller
            .create("v3", 64 * MIB, mount("ext4"), &[])
            .await;
        again.expect("it exists");
    }
}

/// What the value of a series is.
#[derive(Clone, Copy, Debug)]
enum Expect {
    Is(f64),
    /// It is more than this, and finite.
    Above(f64),
}
use Expect::{Above, Is};

/// A panel, the number of its query, labels of a series of it, and its value.
type Known = (
    &'static str,
    usize,
    &'static [(&'static str, &'static str)],
    Expect,
);

const NODE: &[(&str, &str)] = &[("node", "node-1"), ("pool", "default")];
const POOL: &[(&str, &str)] = &[("pool", "default")];
const SCHEDULE: &[(&str, &str)] = &[("schedule", "shop/pg")];
const CLAIM: &[(&str, &str)] = &[
    ("claim_namespace", "shop"),
    ("persistentvolumeclaim", "data"),
];
const LEVEL: &[(&str, &str)] = &[("persistentvolumeclaim", "data"), ("level", "filesystem")];
const CREATE: &[(&str, &str)] = &[("method", "CreateVolume")];

#[rustfmt::skip]
const KNOWN: &[Known] = &[
    ("Pools that are not served", 0, &[], Is(0.0)),
    ("Degraded pools", 0, &[], Is(6.0)),
    ("Frozen file systems", 0, &[], Is(0.0)),
    ("Agents out of reach", 0, &[], Is(1.0)),
    ("Orphans", 0, &[], Is(4.0)),
    ("Used space", 0, NODE, Above(0.0)),
    ("Time until the pool is full", 0, NODE, Above(0.0)),
    ("Free bytes", 0, NODE, Above(1e6)),
    ("Provisioned share", 0, NODE, Above(0.0)),
    ("Bytes of volumes, snapshots and bases", 0, POOL, Above(0.0)),
    ("Bytes of volumes, snapshots and bases", 1, POOL, Above(0.0)),
    ("Volumes and snapshots", 0, POOL, Is(3.0)),
    ("Volumes and snapshots", 1, POOL, Is(1.0)),
    ("Volumes and snapshots", 2, POOL, Is(0.0)),
    ("Damaged records and changed devices", 0, NODE, Is(0.0)),
    ("Metadata of thin pools", 0, &[("node", "node-1"), ("pool", "thin")], Is(0.0)),
    ("Cuts by level", 0, &[("level", "filesystem")], Above(0.0)),
    ("Cuts by level", 0, &[("level", "application")], Is(0.0)),
    ("Failed cuts", 0, &[("reason", "lost")], Is(0.0)),
    ("Frozen time", 0, &[], Above(0.0)),
    ("Frozen time", 1, &[], Above(0.0)),
    ("Quiesce and write-back time", 1, &[], Above(0.0)),
    ("Overdue slots", 0, SCHEDULE, Is(90.0)),
    ("Missed slots", 0, SCHEDULE, Is(3.0)),
    ("Age of the last snapshot", 0, SCHEDULE, Above(1e6)),
    ("Problems of schedules", 0, &[("schedule", "shop/pg"), ("condition", "Retention")], Is(1.0)),
    ("Pools by health", 0, &[("health", "Healthy")], Is(2.0)),
    ("Silence of agents", 0, &[("agent", "node-9")], Is(700.0)),
    ("Silence of agents", 0, &[("agent", "node-2")], Above(0.0)),
    ("Answers of agents", 0, &[("code", "OK")], Above(0.0)),
    ("Time added by the router", 0, &[], Above(0.0)),
    ("Leaders and failing reads", 0, &[], Is(1.0)),
    ("Leaders and failing reads", 1, &[], Is(0.0)),
    ("Validity of certificates", 0, &[("pod", "router-1")], Above(1e6)),
    ("Moves, reverts and quarantine", 0, &[("phase", "Waiting")], Is(2.0)),
    ("Moves, reverts and quarantine", 1, &[], Is(4.0)),
    ("Moves, reverts and quarantine", 2, &[("phase", "Failed")], Is(5.0)),
    ("Claims with data sources", 0, &[("phase", "Populating")], Is(1.0)),
    ("Refused answers and connections", 0, &[], Is(0.0)),
    ("Refused answers and connections", 1, &[], Is(0.0)),
    ("Calls", 0, CREATE, Above(0.0)),
    ("Errors", 0, &[("method", "CreateVolume"), ("code", "INVALID_ARGUMENT")], Above(0.0)),
    ("Duration of calls", 0, CREATE, Above(0.0)),
    ("Running operations", 0, &[("node", "node-1")], Is(0.0)),
    ("Copied bytes", 1, &[], Is(0.0)),
    ("Running copies", 0, &[], Is(0.0)),
    // All of it is in the snapshot that stays.
    ("Own bytes of volumes", 0, CLAIM, Is(0.0)),
    ("Shared bytes of volumes", 0, CLAIM, Above(0.0)),
    ("Snapshot bytes of volumes", 0, CLAIM, Is(0.0)),
    ("Age of the last cut", 0, LEVEL, Above(-10.0)),
];

/// Why a panel does not show what it should; `None` if it does.
fn problem(server: &Prometheus, panel: &Value) -> Option<String> {
    let title = text(&panel["title"]);
    for (number, query) in panel["targets"].as_array()?.iter().enumerate() {
        let expression = substituted(text(&query["expr"]));
        let series = match server.query(&expression) {
            Ok(series) if series.is_empty() => return Some(format!("no series: {expression}")),
            Ok(series) => series,
            Err(error) => return Some(format!("{error}: {expression}")),
        };
        let known = KNOWN.iter().filter(|one| one.0 == title && one.1 == number);
        for (_, _, labels, expected) in known {
            let has = |(found, _): &&Series| {
                let is =
                    |(name, value): &(&str, &str)| found.get(*name).is_some_and(|v| v == value);
                labels.iter().all(is)
            };
            let value = series.iter().find(has).map(|(_, value)| *value);
            let is_right = value.is_some_and(|value| match expected {
                Is(expected) => (value - expected).abs() < 1e-6,
                Above(limit) => value.is_finite() && value > *limit,
            });
            if !is_right {
                return Some(format!(
                    "{labels:?} is {value:?}, not {expected:?}: {expression}\n{series:?}"
                ));
            }
        }
    }
    None
}

/// Every rule is evaluated without an error, with the series of real programs.
fn rules_are_evaluated(server: &Prometheus) {
    eventually("all rules are evaluated", || {
        let rules = server.get("/api/v1/rules").expect("rules");
        let groups = rules["groups"].as_array().expect("groups");
        let all = groups
            .iter()
            .flat_map(|one| one["rules"].as_array())
            .flatten();
        let all: Vec<_> = all.collect();
        let failed = all.iter().find(|one| one["health"] == "err");
        assert!(failed.is_none(), "{failed:?}");
        all.iter().all(|one| one["health"] == "ok")
    });
}

/// The values of each variable are found by its query.
fn variables_have_values(server: &Prometheus) {
    let found = dashboard();
    let variables = found["templating"]["list"].as_array().expect("a list");
    let queried = variables.iter().filter(|one| one["type"] == "query");
    for variable in queried {
        let query = text(&variable["definition"]);
        let inner = query
            .strip_prefix("label_values(")
            .and_then(|rest| rest.strip_suffix(')'));
        let (metric, label) = inner.and_then(|rest| rest.rsplit_once(", ")).expect(query);
        let series = server.query(&substituted(metric)).expect(query);
        let has = series.iter().any(|(labels, _)| labels.contains_key(label));
        assert!(has, "{query}: {series:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_shows_the_expected_series() {
    let what = "the test of the dashboard's panels";
    let Some(program) = packages::find("prometheus", what) else {
        return;
    };
    let titles: BTreeSet<_> = panels()
        .iter()
        .map(|one| text(&one["title"]).to_string())
        .collect();
    for (title, ..) in KNOWN {
        assert!(titles.contains(*title), "no panel {title}");
    }
    let drivers = Drivers::start();
    let volumes = drivers.fill().await;
    let volume = volumes[0].clone();
    let leader = leader(volumes).await.to_string();
    let [alone, agent, router] = &drivers.addresses;
    let targets = [
        (
            alone.as_str(),
            &[
                ("namespace", "slackwater"),
                ("service", "slackwater-metrics"),
                ("endpoint", "metrics"),
                ("job", "slackwater-metrics"),
                ("node", "node-1"),
                ("pod", "alone"),
            ][..],
        ),
        (
            agent.as_str(),
            &[
                ("namespace", "slackwater"),
                ("service", "slackwater-metrics"),
                ("endpoint", "metrics"),
                ("job", "slackwater-metrics"),
                ("node", "node-2"),
                ("pod", "agent"),
            ],
        ),
        (
            router.as_str(),
            &[
                ("namespace", "slackwater"),
                ("service", "slackwater-metrics"),
                ("endpoint", "metrics"),
                ("job", "slackwater-metrics"),
                ("node", "node-2"),
                ("pod", "router-0"),
            ],
        ),
        (
            leader.as_str(),
            &[
                ("namespace", "slackwater"),
                ("service", "slackwater-metrics"),
                ("endpoint", "metrics"),
                ("job", "slackwater-metrics"),
                ("node", "node-1"),
                ("pod", "router-1"),
            ],
        ),
    ];
    let scratch = Scratch::new();
    let rules = alerts::object(&[]).map(|object| alerts::file_of_rules(&object));
    let rules = rules.unwrap_or_default();
    let started = || Prometheus::start(&program, &scratch, &targets, &rules);
    let server = tokio::task::block_in_place(started);
    let start = Instant::now();
    for round in 0.. {
        drivers.work(&volume, round).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let wrong = panels().into_iter().filter_map(|panel| {
            let problem = problem(&server, &panel)?;
            Some(format!("{}: {problem}", text(&panel["title"])))
        });
        let wrong: Vec<_> = wrong.collect();
        if wrong.is_empty() {
            break;
        }
        let wrong = wrong.join("\n");
        assert!(start.elapsed() < WAIT_TIMEOUT, "{wrong}");
    }
    variables_have_values(&server);
    tokio::task::block_in_place(|| rules_are_evaluated(&server));
}
