//! `/metrics`, `/healthz` and `/readyz`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use slackwater::csi::*;
use slackwater::host::memory::MemoryHost;
use slackwater::model::Alpha;
use slackwater::operation::{CutCounts, Settings};
use slackwater::telemetry::populations::Count;
use slackwater::telemetry::router::{
    AgentStatus, ClusterStatus, Orphans, RouterView, ScheduleStatus,
};
use slackwater::telemetry::volumes::VolumeClaim;
use slackwater::telemetry::{Metrics, http};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::service::gate::GatedHost;
use crate::service::harness::*;

async fn listen(metrics: Arc<Metrics>) -> SocketAddr {
    let listener = http::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(http::serve(listener, metrics, std::future::pending()));
    address
}

/// The status and the whole answer.
async fn ask(address: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer)
}

#[tokio::test]
async fn readiness_follows_the_driver() {
    let metrics = Arc::new(Metrics::new());
    let early = listen(metrics.clone()).await;
    assert_eq!(ask(early, "GET /healthz").await.0, 200);
    let (status, text) = ask(early, "GET /readyz").await;
    assert!(status == 503 && text.contains("are not served"), "{text}");
    assert_eq!(ask(early, "GET /metrics").await.0, 200);

    let machine = MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let node = Node::on(machine, Arc::new(host.clone()), Alpha::default(), |_| {}).await;
    let address = listen(node.metrics.clone()).await;
    node.create("v").await;
    assert_eq!(ask(address, "GET /readyz").await.0, 200);
    host.set_missing(&["mkfs.ext4 is not installed (package e2fsprogs)"]);
    let (status, text) = ask(address, "GET /readyz").await;
    assert!(status == 503 && text.contains("e2fsprogs"), "{text}");
    host.set_missing(&[]);
    node.stop().await;
    assert_eq!(ask(address, "GET /readyz").await.0, 503);
    assert_eq!(ask(address, "GET /healthz").await.0, 200);
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let node = Node::start().await;
    let address = listen(node.metrics.clone()).await;
    assert_eq!(ask(address, "GET /").await.0, 404);
    assert_eq!(ask(address, "GET /metrics/x").await.0, 404);
    let (status, text) = ask(address, "POST /metrics").await;
    assert!(status == 405 && text.contains("allow: GET, HEAD"), "{text}");
    node.stop().await;
}

async fn scrape(node: &Node) -> String {
    let address = listen(node.metrics.clone()).await;
    let (status, text) = ask(address, "GET /metrics").await;
    assert_eq!(status, 200);
    assert!(
        text.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{text}"
    );
    text.split_once("\r\n\r\n").unwrap().1.to_string()
}

fn value(text: &str, metric: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(metric));
    let line = line.unwrap_or_else(|| panic!("no {metric} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn calls_pools_and_devices_are_counted() {
    let node = Node::start().await;
    let id = node.staged("v").await;
    node.create("w").await;
    node.node
        .clone()
        .node_stage_volume(stage("nothing"))
        .await
        .unwrap_err();
    let _ = node
        .node
        .clone()
        .node_get_volume_stats(NodeGetVolumeStatsRequest::default())
        .await;
    let text = scrape(&node).await;
    for (metric, expected) in [
        (
            "slackwater_calls_total{method=\"CreateVolume\",code=\"OK\"}",
            2.0,
        ),
        (
            "slackwater_calls_total{method=\"NodeStageVolume\",code=\"OK\"}",
            1.0,
        ),
        (
            "slackwater_calls_total{method=\"NodeStageVolume\",code=\"NOT_FOUND\"}",
            1.0,
        ),
        (
            "slackwater_call_duration_seconds_count{method=\"NodeStageVolume\"}",
            2.0,
        ),
        ("slackwater_operations_running ", 0.0),
        ("slackwater_pool_volumes{pool=\"default\"}", 2.0),
        ("slackwater_pool_served{pool=\"default\"}", 1.0),
        ("slackwater_pool_damaged_records{pool=\"default\"}", 0.0),
        (
            "slackwater_pool_promised_bytes{pool=\"default\"}",
            2.0 * GIB as f64,
        ),
        ("slackwater_loop_devices ", 1.0),
        ("slackwater_formats_total ", 1.0),
        ("slackwater_recovered{pool=\"default\",kind=\"loop\"}", 0.0),
    ] {
        assert_eq!(value(&text, metric), expected, "{metric} in\n{text}");
    }
    assert!(value(&text, "slackwater_pool_total_bytes{pool=\"default\"}") > 0.0);
    assert!(
        text.contains(&format!("version=\"{}\"", env!("CARGO_PKG_VERSION"))),
        "{text}"
    );
    assert!(text.ends_with("# EOF\n"));
    assert!(!text.contains(&id), "ids are no labels");
    node.stop().await;
}

/// A path that no service has must not become a label.
#[tokio::test]
async fn an_unknown_method_is_counted_as_such() {
    let node = Node::start().await;
    let request = GetSnapshotRequest::default();
    let alpha = node.controller.clone().get_snapshot(request).await;
    alpha.unwrap_err();
    let mut grpc = tonic::client::Grpc::new(channel(node.path.clone()));
    grpc.ready().await.unwrap();
    let path = http_path("/csi.v1.Node/Surprise");
    let codec = tonic_prost::ProstCodec::<ProbeRequest, ProbeResponse>::default();
    let answer = grpc
        .unary(tonic::Request::new(ProbeRequest {}), path, codec)
        .await;
    assert_eq!(answer.unwrap_err().code(), tonic::Code::Unimplemented);
    let text = scrape(&node).await;
    let of =
        |method| format!("slackwater_calls_total{{method=\"{method}\",code=\"UNIMPLEMENTED\"}}");
    assert_eq!(value(&text, &of("GetSnapshot")), 1.0);
    assert_eq!(value(&text, &of("unknown")), 1.0);
    node.stop().await;
}

fn http_path(path: &'static str) -> ::http::uri::PathAndQuery {
    ::http::uri::PathAndQuery::from_static(path)
}

fn schedule() -> ScheduleStatus {
    ScheduleStatus {
        last_cut: Some(1_800_000_000),
        overdue_seconds: 90,
        missed: 3,
        failing: vec!["Retention".into()],
    }
}

/// What no API server accepts as a name: it would end the label, the line and the page.
const HOSTILE: &str = "a\"} 7\n# EOF\nslackwater_frozen 9\\";

#[derive(Default)]
struct NoAgents(CutCounts);

impl RouterView for NoAgents {
    fn cluster(&self) -> Option<ClusterStatus> {
        Some(ClusterStatus {
            leads: true,
            dropped_events: 7,
            orphans: Some(Orphans {
                volumes: 3,
                snapshots: Some(1),
            }),
            pools: Some([("Degraded", 6)].into()),
            moves: Some([("Waiting", 2)].into()),
            reverts: Some([("Failed", 5)].into()),
            quarantined: Some(4),
            schedules: Some([("shop/pg".to_string(), schedule())].into()),
            ..ClusterStatus::default()
        })
    }
    fn agents(&self) -> Vec<AgentStatus> {
        Vec::new()
    }

    fn volume_claims(&self) -> Option<Vec<VolumeClaim>> {
        let claim = VolumeClaim {
            volume: "pool.uuid".into(),
            namespace: "shop".into(),
            claim: HOSTILE.into(),
        };
        Some(vec![claim])
    }

    fn cuts(&self) -> &CutCounts {
        &self.0
    }

    fn missing(&self) -> Vec<String> {
        Vec::new()
    }
}

#[tokio::test]
async fn every_metric_is_in_the_manual() {
    let settings = |settings: &mut Settings| settings.metrics_per_volume = true;
    let node = Node::with(Alpha::default(), settings).await;
    let id = node.create("v").await.volume_id;
    for pool in node.driver.served() {
        node.driver.measure_volumes(pool);
    }
    // A node reports no agents. This one is made to, so that all metrics are on one page.
    node.metrics.router().observe(Arc::new(NoAgents::default()));
    node.metrics.show_certificate(|| Some(1_800_000_000));
    node.metrics.show_refused_connections(|| 5);
    let claim = Count {
        phase: "Populating",
        received: 9,
        expected: 20,
    };
    node.metrics.populations().set([claim].into_iter());
    let text = scrape(&node).await;
    assert_eq!(value(&text, "slackwater_orphans{kind=\"volume\"}"), 3.0);
    assert_eq!(value(&text, "slackwater_orphans{kind=\"snapshot\"}"), 1.0);
    let waiting = value(&text, "slackwater_volume_moves{phase=\"Waiting\"}");
    assert_eq!(waiting, 2.0);
    let failed = value(&text, "slackwater_volume_reverts{phase=\"Failed\"}");
    assert_eq!(failed, 5.0);
    let degraded = value(&text, "slackwater_pools{health=\"Degraded\"}");
    assert_eq!(degraded, 6.0);
    assert_eq!(value(&text, "slackwater_quarantined_volumes "), 4.0);
    let of_schedule = |name: &str| value(&text, &format!("{name}{{schedule=\"shop/pg\"}}"));
    assert_eq!(of_schedule("slackwater_schedule_overdue_seconds"), 90.0);
    assert_eq!(of_schedule("slackwater_schedule_missed_slots"), 3.0);
    let last_cut = "slackwater_schedule_last_cut_timestamp_seconds";
    assert_eq!(of_schedule(last_cut), 1_800_000_000.0);
    let failing = "slackwater_schedule_failing{schedule=\"shop/pg\",condition=\"Retention\"}";
    assert_eq!(value(&text, failing), 1.0);
    let of_volume = format!("{{volume=\"{id}\",pool=\"default\"}}");
    let own = value(&text, &format!("slackwater_volume_own_bytes{of_volume}"));
    let allocated = value(&text, "slackwater_pool_allocated_bytes{pool=\"default\"}");
    assert_eq!(own, allocated);
    let escaped = "persistentvolumeclaim=\"a\\\"} 7\\n# EOF\\nslackwater_frozen 9\\\\\"} 1";
    let of_claim =
        format!("slackwater_volume_info{{volume=\"pool.uuid\",claim_namespace=\"shop\",{escaped}");
    assert!(
        text.lines().any(|line| line.starts_with(&of_claim)),
        "{text}"
    );
    assert_eq!(value(&text, "slackwater_frozen "), 0.0);
    let received = value(&text, "slackwater_populations_received_bytes ");
    let expected = value(&text, "slackwater_populations_expected_bytes ");
    assert_eq!((received, expected), (9.0, 20.0));
    let expires = value(&text, "slackwater_certificate_expiry_seconds");
    assert_eq!(expires, 1_800_000_000.0);
    let shown: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .map(|line| {
            let (name, kind) = line.split_once(' ').unwrap();
            match kind {
                "counter" => format!("{name}_total"),
                "info" => format!("{name}_info"),
                _ => name.to_string(),
            }
        })
        .collect();
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let manual = std::fs::read_to_string(manual).unwrap();
    let documented: BTreeSet<String> = manual
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|line| line.split(['`', '{']).next())
        .map(str::to_string)
        .collect();
    assert_eq!(shown, documented);
    node.stop().await;
}
