//! The log: one line per call, with the IDs, and never a secret, at any level.

use std::io::Write;
use std::sync::{Arc, Mutex};

use slackwater::csi::*;
use slackwater::telemetry::{LogFormat, subscriber};

use crate::service::calls::Call;
use crate::service::harness::*;

const SECRET: &str = "hunter2";

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The lines about calls, as JSON.
    fn calls(&self) -> Vec<serde_json::Value> {
        let text = self.text();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let is_call = |line: &serde_json::Value| line["span"]["method"].is_string();
        lines.filter(is_call).collect()
    }

    /// Captures the logs of this thread while the guard lives. The tests' runtime has no other
    /// thread.
    fn capture(&self, format: LogFormat, filter: &str) -> tracing::subscriber::DefaultGuard {
        // While only one subscriber exists, tracing asks it, in the thread that first reaches a
        // callsite, whether it is interested. A thread of another test would disable the callsite
        // for all threads.
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
        let log = self.clone();
        let subscriber = subscriber(format, filter, move || log.clone()).unwrap();
        tracing::subscriber::set_default(subscriber)
    }
}

/// A call of every kind that carries secrets, with `id` for a volume.
fn with_secrets(id: &str) -> Vec<Call> {
    let secrets = || map([("password", SECRET), (SECRET, "x")]);
    let volume_id = || id.to_string();
    let volume_context = || {
        map([
            ("csi.storage.k8s.io/serviceAccount.tokens", SECRET),
            ("csi.storage.k8s.io/pod.name", "db-0"),
        ])
    };
    vec![
        CreateVolumeRequest {
            secrets: secrets(),
            ..create("pvc-1")
        }
        .into(),
        CreateVolumeRequest {
            secrets: secrets(),
            ..create("")
        }
        .into(),
        ControllerPublishVolumeRequest {
            volume_id: volume_id(),
            node_id: NODE.into(),
            volume_capability: Some(mount()),
            secrets: secrets(),
            volume_context: volume_context(),
            ..Default::default()
        }
        .into(),
        ControllerUnpublishVolumeRequest {
            volume_id: volume_id(),
            secrets: secrets(),
            ..Default::default()
        }
        .into(),
        ValidateVolumeCapabilitiesRequest {
            volume_id: volume_id(),
            volume_capabilities: vec![mount()],
            secrets: secrets(),
            ..Default::default()
        }
        .into(),
        ControllerListVolumeHealthRequest {
            secrets: secrets(),
            ..Default::default()
        }
        .into(),
        ControllerGetVolumeHealthRequest {
            volume_id: volume_id(),
            secrets: secrets(),
        }
        .into(),
        ControllerExpandVolumeRequest {
            volume_id: volume_id(),
            capacity_range: at_least(GIB),
            secrets: secrets(),
            ..Default::default()
        }
        .into(),
        ControllerModifyVolumeRequest {
            volume_id: volume_id(),
            secrets: secrets(),
            ..Default::default()
        }
        .into(),
        NodeStageVolumeRequest {
            secrets: secrets(),
            volume_context: volume_context(),
            ..stage(id)
        }
        .into(),
        NodePublishVolumeRequest {
            secrets: secrets(),
            volume_context: volume_context(),
            ..publish(id, TARGET)
        }
        .into(),
        NodeExpandVolumeRequest {
            volume_id: volume_id(),
            volume_path: TARGET.into(),
            secrets: secrets(),
            ..Default::default()
        }
        .into(),
        NodeGetStorageHealthRequest { secrets: secrets() }.into(),
        CreateSnapshotRequest {
            secrets: secrets(),
            parameters: map([("deletionPolicy", "Delete")]),
            ..snapshot("snapshot-1", id)
        }
        .into(),
        CreateSnapshotRequest {
            secrets: secrets(),
            ..snapshot("", id)
        }
        .into(),
        DeleteSnapshotRequest {
            secrets: secrets(),
            snapshot_id: volume_id(),
        }
        .into(),
        ListSnapshotsRequest {
            secrets: secrets(),
            source_volume_id: volume_id(),
            ..Default::default()
        }
        .into(),
        GetSnapshotRequest {
            secrets: secrets(),
            snapshot_id: volume_id(),
        }
        .into(),
        CreateVolumeGroupSnapshotRequest {
            secrets: secrets(),
            ..group("group-1", &[id])
        }
        .into(),
        CreateVolumeGroupSnapshotRequest {
            secrets: secrets(),
            ..group("group-1", &[id, id])
        }
        .into(),
        GetVolumeGroupSnapshotRequest {
            secrets: secrets(),
            group_snapshot_id: "some-group".into(),
            snapshot_ids: vec![volume_id()],
        }
        .into(),
        DeleteVolumeGroupSnapshotRequest {
            secrets: secrets(),
            group_snapshot_id: "some-group".into(),
            snapshot_ids: vec![volume_id()],
        }
        .into(),
        DeleteVolumeRequest {
            volume_id: volume_id(),
            secrets: secrets(),
        }
        .into(),
    ]
}

#[tokio::test]
async fn no_level_and_no_error_shows_a_secret() {
    for format in [LogFormat::Text, LogFormat::Json] {
        let log = Log::default();
        let guard = log.capture(format, "trace");
        let node = Node::with_alpha(all_alpha()).await;
        let id = node.create("pvc-1").await.volume_id;
        let mut answers = String::new();
        for id in [id.as_str(), "no-such-volume"] {
            for call in with_secrets(id) {
                let answer = call.send(&node).await;
                answers.push_str(&format!("{answer:?}\n"));
            }
        }
        node.stop().await;
        drop(guard);
        let text = log.text();
        assert!(text.contains("<2 redacted>"), "requests are traced");
        assert!(
            text.contains("db-0"),
            "a value that is not secret is logged"
        );
        for text in [text, answers] {
            if let Some(at) = text.find(SECRET) {
                let from = text.floor_char_boundary(at.saturating_sub(300));
                panic!("a secret after {}", &text[from..at]);
            }
        }
    }
}

#[tokio::test]
async fn a_call_is_one_line_with_its_ids_its_code_and_its_error() {
    let log = Log::default();
    let guard = log.capture(LogFormat::Json, "info");
    let node = Node::start().await;
    let id = node.create("pvc-1").await.volume_id;
    node.node
        .clone()
        .node_stage_volume(stage(&id))
        .await
        .unwrap();
    node.identity.clone().probe(ProbeRequest {}).await.unwrap();
    let evil = "x\n{\"level\":\"ERROR\"}";
    node.node
        .clone()
        .node_publish_volume(publish(evil, TARGET))
        .await
        .unwrap_err();
    let mut kubelet = node.node.clone();
    node.host.fail_always("bind", Some(nix::errno::Errno::EIO));
    kubelet
        .node_publish_volume(publish(&id, TARGET))
        .await
        .unwrap_err();
    node.stop().await;
    drop(guard);

    let lines = log.calls();
    assert_eq!(lines.len(), 4, "Probe is for debug: {lines:?}");
    let [created, staged, refused, failed] = &lines[..] else {
        unreachable!()
    };
    assert_eq!(
        (&created["level"], &created["code"]),
        (&"INFO".into(), &"OK".into())
    );
    assert_eq!(created["span"]["method"], "CreateVolume");
    assert_eq!(created["span"]["volume_name"], "pvc-1");
    assert_eq!(created["span"]["volume_id"], id.as_str());
    assert!(created["ms"].is_number());
    assert_eq!(staged["span"]["volume_id"], id.as_str());
    assert_eq!(staged["span"]["staging_target_path"], STAGING);
    assert_eq!(
        (&refused["level"], &refused["code"]),
        (&"WARN".into(), &"NOT_FOUND".into())
    );
    assert_eq!(refused["span"]["volume_id"], evil);
    assert!(
        refused["error"]
            .as_str()
            .unwrap()
            .contains("does not exist")
    );
    assert_eq!(
        (&failed["level"], &failed["code"]),
        (&"ERROR".into(), &"INTERNAL".into())
    );
    assert!(failed["error"].as_str().unwrap().contains("EIO"));
}

/// Also for a refused call, so that its objects can be found.
#[tokio::test]
async fn calls_about_snapshots_and_groups_have_their_ids_on_their_line() {
    let log = Log::default();
    let guard = log.capture(LogFormat::Json, "info");
    let node = Node::start().await;
    let none = |request: CreateVolumeRequest, source| CreateVolumeRequest {
        capacity_range: at_least(-1),
        volume_content_source: Some(VolumeContentSource {
            r#type: Some(source),
        }),
        ..request
    };
    let calls: [(Call, &[(&str, &str)]); 8] = [
        (
            none(create("r"), from_snapshot("s")).into(),
            &[("volume_name", "r"), ("source_snapshot_id", "s")],
        ),
        (
            none(create("c"), from_volume("v")).into(),
            &[("volume_name", "c"), ("source_volume_id", "v")],
        ),
        (
            CreateSnapshotRequest {
                parameters: map([("colour", "red")]),
                ..snapshot("snap", "v")
            }
            .into(),
            &[("snapshot_name", "snap"), ("source_volume_id", "v")],
        ),
        (
            ListSnapshotsRequest {
                max_entries: -1,
                snapshot_id: "s".into(),
                source_volume_id: "v".into(),
                ..Default::default()
            }
            .into(),
            &[("snapshot_id", "s"), ("source_volume_id", "v")],
        ),
        (
            ListSnapshotsRequest {
                starting_token: "no-token".into(),
                snapshot_id: "s".into(),
                ..Default::default()
            }
            .into(),
            &[("snapshot_id", "s")],
        ),
        (
            group("g", &["v", "w", "v"]).into(),
            &[("group_snapshot_name", "g"), ("source_volume_ids", "v w v")],
        ),
        (
            DeleteVolumeGroupSnapshotRequest {
                snapshot_ids: vec!["s".into(), "t".into()],
                ..Default::default()
            }
            .into(),
            &[("snapshot_ids", "s t")],
        ),
        (
            GetVolumeGroupSnapshotRequest {
                group_snapshot_id: "no-group".into(),
                snapshot_ids: vec!["s".into()],
                ..Default::default()
            }
            .into(),
            &[("group_snapshot_id", "no-group"), ("snapshot_ids", "s")],
        ),
    ];
    let mut expected = Vec::new();
    for (call, ids) in calls {
        expected.push((call.rpc(), ids));
        call.send(&node).await.unwrap_err();
    }
    node.stop().await;
    drop(guard);
    let lines = log.calls();
    assert_eq!(lines.len(), expected.len(), "{lines:?}");
    for (line, (rpc, ids)) in lines.iter().zip(expected) {
        assert_eq!(line["span"]["method"], rpc.name());
        for (field, id) in ids {
            assert_eq!(line["span"][field], *id, "{line}");
        }
    }
}

/// The ID of the created object is logged next to its requested name.
#[tokio::test]
async fn a_cut_is_logged_with_the_ids_of_its_snapshots() {
    let log = Log::default();
    let guard = log.capture(LogFormat::Json, "info");
    let node = Node::start().await;
    let id = node.create("v").await.volume_id;
    let cut = node.cut("s", &id).await.snapshot_id;
    let cut_group = node.group(group("g", &[&id])).await.group_snapshot_id;
    node.stop().await;
    drop(guard);
    let text = log.text();
    let line = |method: &str| {
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let mut mine = lines.filter(|line: &serde_json::Value| {
            line["span"]["method"] == method && line["code"].is_string()
        });
        mine.next().unwrap()
    };
    let snapshot = line("CreateSnapshot");
    assert_eq!(snapshot["span"]["snapshot_name"], "s");
    assert_eq!(snapshot["span"]["source_volume_id"], id.as_str());
    assert_eq!(snapshot["span"]["snapshot_id"], cut.as_str());
    let group = line("CreateVolumeGroupSnapshot");
    assert_eq!(group["span"]["group_snapshot_name"], "g");
    assert_eq!(group["span"]["source_volume_ids"], id.as_str());
    assert_eq!(group["span"]["group_snapshot_id"], cut_group.as_str());
}

/// The upstream suite and many classes have it among the parameters.
#[tokio::test]
async fn a_deletion_policy_among_the_parameters_is_logged_once_per_call() {
    let log = Log::default();
    let guard = log.capture(LogFormat::Text, "info");
    let node = Node::start().await;
    let slip = || map([("deletionPolicy", "Delete")]);
    let calls: [Call; 2] = [
        CreateSnapshotRequest {
            parameters: slip(),
            ..snapshot("s", "no-such-volume")
        }
        .into(),
        CreateVolumeGroupSnapshotRequest {
            parameters: slip(),
            ..group("g", &["no-such-volume"])
        }
        .into(),
    ];
    for call in calls {
        let status = call.send(&node).await.unwrap_err();
        assert_ne!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
    }
    node.stop().await;
    drop(guard);
    let text = log.text();
    let warned = |line: &&str| line.contains("ignoring parameters.deletionPolicy");
    assert_eq!(text.lines().filter(warned).count(), 2, "{text}");
}

#[tokio::test]
async fn input_of_a_caller_never_adds_log_lines() {
    let log = Log::default();
    let guard = log.capture(LogFormat::Text, "info");
    let node = Node::start().await;
    let evil = format!("a\nb\u{1b}[31m{}", "c".repeat(10_000));
    node.node
        .clone()
        .node_publish_volume(publish(&evil, TARGET))
        .await
        .unwrap_err();
    node.stop().await;
    drop(guard);
    let text = log.text();
    let lines: Vec<_> = text
        .lines()
        .filter(|line| line.contains("NodePublishVolume"))
        .collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(
        lines[0].contains("NOT_FOUND") && lines[0].len() < 4096,
        "{}",
        lines[0].len()
    );
    assert!(!text.contains('\u{1b}'));
}

/// A call whose caller disconnects is counted and logged as well.
#[tokio::test]
async fn a_call_whose_caller_disconnects_is_logged() {
    let log = Log::default();
    let guard = log.capture(LogFormat::Text, "info");
    let (host, node) = crate::service::gate::gated().await;
    node.abandon_create(&host).await;
    while !log.text().contains("CANCELLED") {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    host.open();
    node.stop().await;
    drop(guard);
    assert!(log.text().contains("the operation continues"));
}
