//! Hooks by exec: their selection and their life.

use std::time::Duration;

use serde_json::{Value, json};
use slackwater::error::{Error, chain};
use slackwater::hook::{HookRights, HookTarget, Hooks, PodHooks, Quiesced};
use slackwater::model::SharedVolume;

use crate::kube::kubelet::ApiServer;
use slackwater_testkit::eventually;

/// Nothing here takes as long, unless it hangs.
const LONG: Duration = Duration::from_secs(60);
/// Quiesces, holds until its stdin ends, keeps writing, and releases.
const GOOD: &str =
    "echo READY; cat > /dev/null; echo more; echo released >> LOG; echo bye >&2; sleep 0.2";

struct Fixture {
    server: ApiServer,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::Builder::new()
            .prefix("slackwater-kube-")
            .tempdir()
            .unwrap();
        Fixture {
            server: ApiServer::new(),
            folder,
        }
    }

    /// One running pod, `shop/db-0`, that uses claim `data` and has this script as its session.
    fn with(script: &str, more: Value) -> Fixture {
        let fixture = Fixture::new();
        let mut annotations = json!({
            "hooks.slackwater.dev/session": fixture.session(script),
        });
        let more = more.as_object().unwrap().clone();
        annotations.as_object_mut().unwrap().extend(more);
        fixture.pods("shop", &[pod("db-0", annotations)]);
        fixture
    }

    fn session(&self, script: &str) -> String {
        let script = script.replace("LOG", self.log().to_str().unwrap());
        json!(["/bin/sh", "-c", script]).to_string()
    }

    fn log(&self) -> std::path::PathBuf {
        self.folder.path().join("log")
    }

    fn lines(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        text.lines().map(Into::into).collect()
    }

    fn pods(&self, namespace: &str, pods: &[Value]) {
        let folder = format!("/api/v1/namespaces/{namespace}/pods");
        for pod in pods {
            let name = pod["metadata"]["name"].as_str().unwrap();
            self.server.put(&format!("{folder}/{name}"), pod.clone());
        }
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods});
        self.server.put(&folder, list);
    }

    fn hooks(&self) -> PodHooks {
        let client = self.server.client();
        let _inside = self.server.runtime.enter();
        PodHooks::new(client).with_grace(Duration::from_secs(20))
    }

    fn quiesce(&self) -> Result<Box<dyn Quiesced>, Error> {
        self.hooks().quiesce(&["shop/db-0/main".into()], LONG)
    }
}

fn pod(name: &str, annotations: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "annotations": annotations},
        "spec": {
            "containers": [{"name": "main"}, {"name": "side"}],
            "initContainers": [{"name": "once"}, {"name": "early", "restartPolicy": "Always"}],
            "volumes": [
                {"name": "a", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "scratch", "ephemeral": {}},
            ],
        },
        "status": {"phase": "Running"},
    })
}

fn target(claim: &str) -> HookTarget {
    HookTarget {
        volume_id: format!("id-of-{claim}"),
        claim: Some(format!("shop/{claim}")),
        node: None,
    }
}

#[track_caller]
fn failed<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("the hook fails");
    assert!(matches!(error, Error::QuiesceFailed { .. }), "{error:?}");
    chain(&error)
}

#[test]
fn stdin_is_closed_while_reading_goes_on() {
    let fixture = Fixture::with(GOOD, json!({}));
    let mut held = fixture.quiesce().unwrap();
    held.verify().unwrap();
    assert_eq!(
        fixture.lines(),
        [""; 0],
        "the session holds as long as its stdin is open"
    );
    // Its status follows the end of its stdin, so it has been read by then.
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(fixture.lines(), ["released"]);
}

#[test]
fn a_failure_at_release_is_reported_with_its_output() {
    let script = "echo READY; cat > /dev/null; echo it was lost >&2; exit 7";
    let fixture = Fixture::with(script, json!({}));
    let mut held = fixture.quiesce().unwrap();
    held.verify().unwrap();
    let message = failed(held.release());
    assert!(message.contains("shop/db-0/main"), "{message}");
    assert!(
        message.contains("exit status: 7") && message.contains("it was lost"),
        "{message}"
    );
}

#[test]
fn a_session_that_ends_before_the_cut_did_not_hold() {
    let fixture = Fixture::with("echo READY; sleep 0.1; exit 0", json!({}));
    let mut held = fixture.quiesce().unwrap();
    eventually("the session's end is seen", || held.verify().is_err());
    let message = failed(held.verify());
    assert!(
        message.contains("exit status: 0 before the cut"),
        "{message}"
    );
}

#[test]
fn a_session_that_is_never_ready_is_ended() {
    let script = "cat > /dev/null; echo let go >> LOG";
    let fixture = Fixture::with(script, json!({}));
    // Shorter than its own deadline, which would be reported in other words.
    let limit = Duration::from_secs(5);
    let message = failed(fixture.hooks().quiesce(&["shop/db-0/main".into()], limit));
    assert!(
        message.contains("did not print READY within 5000 ms"),
        "{message}"
    );
    eventually("the session sees the end of its stdin", || {
        fixture.lines() == ["let go"]
    });
}

#[test]
fn a_missing_program_is_reported() {
    let fixture = Fixture::new();
    let session = json!({"hooks.slackwater.dev/session": r#"["/no/such/program"]"#});
    fixture.pods("shop", &[pod("db-0", session)]);
    let message = failed(fixture.quiesce());
    assert!(message.contains("before it printed READY"), "{message}");
}

#[test]
fn a_lost_connection_fails_the_check_and_releases_the_application() {
    let fixture = Fixture::with(GOOD, json!({}));
    let mut held = fixture.quiesce().unwrap();
    held.verify().unwrap();
    fixture.server.cut_off();
    eventually("the loss is seen", || held.verify().is_err());
    assert!(failed(held.verify()).contains("connection loss"));
    eventually("the application is released nevertheless", || {
        fixture.lines() == ["released"]
    });
    assert!(failed(held.release()).contains("connection loss"));
}

#[test]
fn dropped_sessions_release() {
    let fixture = Fixture::with(GOOD, json!({}));
    drop(fixture.quiesce().unwrap());
    assert_eq!(fixture.lines(), ["released"]);
}

#[test]
fn a_session_without_output_after_its_deadline_does_not_count() {
    // It claims to release after `{seconds}`, but does not; the driver cannot see its actions.
    let script = "echo {seconds} >> LOG; echo READY; cat > /dev/null";
    let fixture = Fixture::with(script, json!({"hooks.slackwater.dev/timeout": "20s"}));
    let mut held = fixture.quiesce().unwrap();
    held.verify().unwrap();
    assert_eq!(fixture.lines(), ["20"]);
    eventually("its deadline passes", || held.verify().is_err());
    assert!(failed(held.verify()).contains("its own deadline (20 s)"));
}

#[test]
fn a_session_that_does_not_end_does_not_prove_the_level() {
    let fixture = Fixture::with("echo READY; exec sleep 40", json!({}));
    let hooks = fixture.hooks().with_grace(Duration::from_millis(200));
    let mut held = hooks.quiesce(&["shop/db-0/main".into()], LONG).unwrap();
    held.verify().unwrap();
    let message = failed(held.release());
    assert!(
        message.contains("is unknown whether its application was quiesced"),
        "{message}"
    );
}

#[test]
fn one_that_fails_releases_all_others() {
    let fixture = Fixture::new();
    let session = |script: &str| json!({"hooks.slackwater.dev/session": fixture.session(script)});
    let pods = [pod("a", session(GOOD)), pod("b", session("exit 3"))];
    fixture.pods("shop", &pods);
    let names = ["shop/a/main".to_string(), "shop/b/main".into()];
    let message = failed(fixture.hooks().quiesce(&names, LONG));
    assert!(
        message.contains("shop/b/main") && message.contains("exit status: 3"),
        "{message}"
    );
    eventually("the other is released", || fixture.lines() == ["released"]);
}

#[test]
fn a_forbidden_request_names_the_role_to_bind() {
    let fixture = Fixture::with(GOOD, json!({}));
    fixture
        .server
        .forbid("/api/v1/namespaces/shop/pods/db-0/exec");
    let message = failed(fixture.quiesce());
    for word in [
        "forbidden",
        "ClusterRole slackwater-hooks",
        "namespace shop",
    ] {
        assert!(message.contains(word), "{message}");
    }
    fixture.server.forbid("/api/v1/namespaces/shop/pods");
    let message = failed(fixture.hooks().wanted(&[target("data")], SharedVolume::All));
    assert!(
        message.contains("ClusterRole slackwater-hooks"),
        "{message}"
    );
    // With the names that the chart uses for another release name.
    let hooks = fixture.hooks().with_rights(HookRights {
        role: "disks-slackwater-hooks".into(),
        account: "storage:disks-slackwater-controller".into(),
    });
    for message in [
        failed(hooks.wanted(&[target("data")], SharedVolume::All)),
        failed(hooks.quiesce(&["shop/db-0/main".into()], LONG)),
    ] {
        for word in [
            "ClusterRole disks-slackwater-hooks",
            "ServiceAccount storage:disks-slackwater-controller",
        ] {
            assert!(message.contains(word), "{message}");
        }
    }
}

#[test]
fn hooks_are_those_of_running_pods_that_use_the_claim() {
    let fixture = Fixture::new();
    let hook = || json!({"hooks.slackwater.dev/session": r#"["hold"]"#});
    let mut ended = pod("ended", hook());
    ended["status"]["phase"] = "Succeeded".into();
    let mut other = pod("other", hook());
    other["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = "logs".into();
    let mut side = hook();
    side["hooks.slackwater.dev/container"] = "early".into();
    let mut skipped = hook();
    skipped["hooks.slackwater.dev/skip"] = "true".into();
    let pods = [
        pod("web", side),
        pod("db", hook()),
        pod("plain", json!({})),
        pod("skipped", skipped),
        ended,
        other,
    ];
    fixture.pods("shop", &pods);
    let hooks = fixture.hooks();
    let wanted = |claim: &str, shared| hooks.wanted(&[target(claim)], shared);
    let both = ["shop/db/main", "shop/web/early"];
    assert_eq!(wanted("data", SharedVolume::All).unwrap(), both);
    assert_eq!(wanted("data", SharedVolume::One).unwrap(), ["shop/db/main"]);
    assert_eq!(wanted("data", SharedVolume::Skip).unwrap(), [""; 0]);
    let refused = wanted("data", SharedVolume::Fail).unwrap_err();
    assert!(chain(&refused).contains("sharedVolume: fail"), "{refused}");
    assert_eq!(
        wanted("logs", SharedVolume::Fail).unwrap(),
        ["shop/other/main"]
    );
    // The claim of a generic ephemeral volume is named POD-VOLUME.
    assert_eq!(
        wanted("db-scratch", SharedVolume::Fail).unwrap(),
        ["shop/db/main"]
    );
    assert_eq!(wanted("nobodys", SharedVolume::Fail).unwrap(), [""; 0]);
    // Each hook of several volumes runs once, and the pods of a namespace are listed once.
    let before = fixture.server.asked("fieldSelector");
    let three = [target("data"), target("logs"), target("db-scratch")];
    let all = hooks.wanted(&three, SharedVolume::All).unwrap();
    assert_eq!(all, ["shop/db/main", "shop/other/main", "shop/web/early"]);
    assert_eq!(fixture.server.asked("fieldSelector") - before, 1);
    // A claim may contain skip, and only that.
    let claim = |annotations: Value| {
        let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "shop", "annotations": annotations}});
        fixture
            .server
            .put("/api/v1/namespaces/shop/persistentvolumeclaims/data", claim);
    };
    claim(json!({"hooks.slackwater.dev/session": r#"["/bin/evil"]"#}));
    assert_eq!(wanted("data", SharedVolume::All).unwrap(), both);
    claim(json!({"hooks.slackwater.dev/skip": "true"}));
    assert_eq!(wanted("data", SharedVolume::Fail).unwrap(), [""; 0]);
    claim(json!({"hooks.slackwater.dev/skip": "yes"}));
    let message = failed(wanted("data", SharedVolume::All));
    assert!(
        message.contains("claim shop/data") && message.contains("/skip"),
        "{message}"
    );
}

#[test]
fn bad_annotations_name_the_pod_and_the_annotation() {
    let cases = [
        ("session", "pg_hold --now"),
        ("session", "[]"),
        ("session", r#"[""]"#),
        ("session", r#"["a", 1]"#),
        ("session", r#"["a", "\u0000"]"#),
        ("container", "nobody"),
        ("container", "once"),
        ("timeout", "soon"),
        ("timeout", "0s"),
        ("timeout", "601s"),
        ("skip", "maybe"),
        ("sesion", "[]"),
    ];
    for (name, value) in cases {
        let fixture = Fixture::new();
        let name = format!("hooks.slackwater.dev/{name}");
        let mut annotations = json!({"hooks.slackwater.dev/session": r#"["hold"]"#});
        annotations[&name] = value.into();
        fixture.pods("shop", &[pod("db-0", annotations)]);
        let message = failed(fixture.hooks().wanted(&[target("data")], SharedVolume::All));
        assert!(message.contains("pod shop/db-0"), "{message}");
        assert!(message.contains(&format!("annotation {name}")), "{message}");
    }
}

#[test]
fn annotations_that_changed_since_are_not_run() {
    let fixture = Fixture::with(GOOD, json!({}));
    let hooks = fixture.hooks();
    let names = hooks.wanted(&[target("data")], SharedVolume::All).unwrap();
    fixture.pods("shop", &[pod("db-0", json!({}))]);
    assert!(failed(hooks.quiesce(&names, LONG)).contains("have changed"));
}
