//! `doctor` and `check`, as a process, with a small API server that runs programs in pods.

use serde_json::{Value, json};

use crate::exec_server::{End, Execs, Run, Script, pod};
use crate::fixture::{DRIVER, id};

fn run(pod: &str, words: &[&str]) -> Run {
    Run {
        pod: pod.into(),
        container: "driver".into(),
        words: words.iter().map(ToString::to_string).collect(),
        input: None,
    }
}

const DOCTOR: [&str; 5] = [
    "slackwater",
    "doctor",
    "--pool=default=file:/srv/pool,init",
    "--node-record=/var/lib/slackwater/node.json",
    "--state-dir=/run/slackwater/state",
];

#[test]
fn the_doctor_of_a_node_is_that_of_its_pod_with_its_options_output_and_exit_code() {
    let cluster = Execs::start();
    let done = cluster.output(&["doctor", "node-2"]);
    assert_eq!(done.stdout, b"all is well on node-2\n");
    assert!(done.status.success(), "{done:?}");
    assert_eq!(cluster.runs(), [run("driver-2", &DOCTOR)]);
    // The output is that of the command, whatever is in it.
    let script = Script::of("a\u{1b}[1m\n", "b\u{1b}\n", End::Code(64));
    cluster.script("driver-1", script);
    let done = cluster.output(&[
        "doctor",
        "node-1",
        "-o",
        "json",
        "--driver-namespace",
        "storage",
    ]);
    assert_eq!(done.stdout, b"a\x1b[1m\n");
    assert!(done.stderr.starts_with(b"b\x1b\n"), "{done:?}");
    assert_eq!(done.status.code(), Some(64));
    let words = [&DOCTOR[..], &["--json"]].concat();
    assert_eq!(cluster.runs(), [run("driver-1", &words)]);
}

#[test]
fn a_node_that_cannot_be_examined_does_not_stop_the_others() {
    let cluster = Execs::start();
    let mut state = cluster.state.lock().unwrap();
    // A node with a pool and without a pod, and one whose driver does not run.
    let pool = "/apis/slackwater.dev/v1alpha1/pools/x";
    let gone = json!({"metadata": {"name": "x"}, "status": {"node": "node-0", "name": "default"}});
    state.objects.insert(pool.into(), gone);
    let mut restarting = pod("driver-3", "node-3");
    restarting["status"]["containerStatuses"][0]["ready"] = json!(false);
    state.pods.push(restarting);
    drop(state);
    cluster.script("driver-1", Script::of("no\n", "", End::Code(1)));
    insta::assert_snapshot!("doctor_of_all", cluster.says(&["doctor"]));
    cluster.script("driver-1", Script::of("{\"ok\": false}", "", End::Code(1)));
    cluster.script("driver-2", Script::of("{\"ok\": true}", "", End::Code(0)));
    let done = cluster.output(&["doctor", "-o", "json"]);
    assert_eq!(done.status.code(), Some(1));
    let all: Value = serde_json::from_slice(&done.stdout).unwrap();
    let items = all["items"].as_array().unwrap();
    let nodes: Vec<_> = items.iter().map(|item| &item["node"]).collect();
    assert_eq!(nodes, ["node-0", "node-1", "node-2", "node-3"]);
    assert_eq!(
        items[1],
        json!({"node": "node-1", "exitCode": 1, "doctor": {"ok": false}})
    );
    assert_eq!(
        items[2],
        json!({"node": "node-2", "exitCode": 0, "doctor": {"ok": true}})
    );
    assert!(
        items[3]["error"].as_str().unwrap().contains("not ready"),
        "{all}"
    );
}

#[test]
fn what_cannot_be_run_is_refused_with_what_is_to_be_done() {
    let cluster = Execs::start();
    let says = |words: &[&str]| cluster.says(words);
    let mut all = vec![
        says(&["doctor", "node-9"]),
        says(&["check", "none"]),
        says(&["check", "pending"]),
        says(&["check", "foreign"]),
        says(&["check", &id(2, 1)]),
    ];
    let state = || cluster.state.lock().unwrap();
    state().denied = vec!["create"];
    all.push(says(&["doctor", "node-1"]));
    all.push(says(&["check", "data"]));
    state().denied = Vec::new();
    state().pods.push(pod("driver-4", "node-2"));
    all.push(says(&["doctor", "node-2"]));
    state().pods.clear();
    all.push(says(&["doctor", "node-1"]));
    all.push(says(&["doctor", "-o", "json"]));
    all.push(says(&["check", "data", "--yes"]));
    insta::assert_snapshot!("on_node_refused", all.join("\n"));
    assert_eq!(cluster.runs(), []);
}

#[test]
fn a_pod_that_a_tenant_labels_like_the_drivers_gets_no_command() {
    let cluster = Execs::start();
    let driver = json!({"metadata": {"name": DRIVER,
        "annotations": {"meta.helm.sh/release-namespace": "storage"}}});
    let path = format!("/apis/storage.k8s.io/v1/csidrivers/{DRIVER}");
    let mut state = cluster.state.lock().unwrap();
    state.objects.insert(path, driver);
    for node in ["node-2", "node-9"] {
        let mut decoy = pod("driver-9", node);
        decoy["metadata"]["namespace"] = json!("tenant");
        state.pods.push(decoy);
    }
    drop(state);
    assert!(cluster.output(&["doctor", "node-2"]).status.success());
    assert_eq!(cluster.runs(), [run("driver-2", &DOCTOR)]);
    assert!(!cluster.output(&["doctor", "node-9"]).status.success());
    assert_eq!(cluster.runs(), []);
}

#[test]
fn a_command_has_succeeded_only_if_this_was_reported() {
    let cluster = Execs::start();
    let ends = [
        End::Closed,
        End::Broken,
        End::Refused("no container\u{1b}"),
        End::Code(1),
    ];
    let mut all = Vec::new();
    for end in ends {
        cluster.script("driver-1", Script::of("all is well\n", "", end));
        all.push(cluster.says(&["doctor", "node-1"]));
    }
    insta::assert_snapshot!("on_node_failed", all.join("\n"));
}

#[test]
fn a_volume_is_checked_on_its_node_and_repaired_only_with_yes() {
    let cluster = Execs::start();
    let id = id(0, 1);
    let words = |more: &[&str]| {
        let words = [
            "slackwater",
            "volumes",
            "check",
            &id,
            "--endpoint=unix:///plugin/csi.sock",
        ];
        [run("driver-1", &[&words[..], more].concat())]
    };
    for claim in ["data", &id] {
        let done = cluster.output(&["check", claim]);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(cluster.runs(), words(&[]));
    }
    let mut all = Vec::new();
    for more in [
        &["--repair"][..],
        &["--repair", "--dry-run"],
        &["--dry-run"],
    ] {
        all.push(cluster.says(&[&["check", "data"], more].concat()));
        assert_eq!(cluster.runs(), []);
    }
    all.push(cluster.says(&["check", "data", "--repair", "--yes"]));
    insta::assert_snapshot!("check", all.join("\n"));
    assert_eq!(cluster.runs(), words(&["--repair"]));
    let done = cluster.output(&["check", "data", "--repair", "--yes", "-o", "json"]);
    assert_eq!(done.stdout, b"all is well on node-1\n");
    assert_eq!(cluster.runs(), words(&["--repair", "--json"]));
}
