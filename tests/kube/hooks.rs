//! Hooks by exec: which are wanted, and their life.

use std::time::Duration;

use serde_json::{Value, json};
use slackwater::error::{Error, chain};
use slackwater::hook::{HookRights, HookTarget, Hooks, PodHooks, Quiesced};
use slackwater::model::SharedVolume;

use crate::kubelet::ApiServer;
use crate::support::eventually;

/// Nothing here takes as long, unless it hangs.
const LONG: Duration = Duration::from_secs(60);
/// Quiesces, holds until the end of its stdin, speaks on, releases.
const GOOD: &str =
    "echo READY; cat > /dev/null; echo more; echo released >> LOG; echo bye >&2; sleep 0.2";

struct Ground {
    server: ApiServer,
    folder: tempfile::TempDir,
}

impl Ground {
    fn new() -> Ground {
        let folder = tempfile::Builder::new()
            .prefix("slackwater-kube-")
            .tempdir()
            .unwrap();
        Ground {
            server: ApiServer::new(),
            folder,
        }
    }

    /// One running pod, `shop/db-0`, that uses claim `data` and has this script as its session.
    fn with(script: &str, more: Value) -> Ground {
        let ground = Ground::new();
        let mut annotations = json!({
            "hooks.slackwater.dev/session": ground.session(script),
        });
        let more = more.as_object().unwrap().clone();
        annotations.as_object_mut().unwrap().extend(more);
        ground.pods("shop", &[pod("db-0", annotations)]);
        ground
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
    let error = result.err().expect("it fails");
    assert!(matches!(error, Error::QuiesceFailed { .. }), "{error:?}");
    chain(&error)
}

#[test]
fn stdin_is_closed_while_reading_goes_on() {
    let ground = Ground::with(GOOD, json!({}));
    let mut held = ground.quiesce().unwrap();
    held.verify().unwrap();
    assert_eq!(
        ground.lines(),
        [""; 0],
        "it holds as long as its stdin is open"
    );
    // Its status comes after the end of its stdin: it's been read by then.
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(ground.lines(), ["released"]);
}

#[test]
fn a_failure_at_release_is_told_with_its_words() {
    let script = "echo READY; cat > /dev/null; echo it was lost >&2; exit 7";
    let ground = Ground::with(script, json!({}));
    let mut held = ground.quiesce().unwrap();
    held.verify().unwrap();
    let told = failed(held.release());
    assert!(told.contains("shop/db-0/main"), "{told}");
    assert!(
        told.contains("exit status: 7") && told.contains("it was lost"),
        "{told}"
    );
}

#[test]
fn a_session_that_ends_before_the_cut_did_not_hold() {
    let ground = Ground::with("echo READY; sleep 0.1; exit 0", json!({}));
    let mut held = ground.quiesce().unwrap();
    eventually("its end is seen", || held.verify().is_err());
    let told = failed(held.verify());
    assert!(told.contains("exit status: 0 before the cut"), "{told}");
}

#[test]
fn a_session_that_is_never_ready_is_let_go() {
    let script = "cat > /dev/null; echo let go >> LOG";
    let ground = Ground::with(script, json!({}));
    // Shorter than its own deadline, which would be told in other words.
    let limit = Duration::from_secs(5);
    let told = failed(ground.hooks().quiesce(&["shop/db-0/main".into()], limit));
    assert!(
        told.contains("did not print READY within 5000 ms"),
        "{told}"
    );
    eventually("it sees the end of its stdin", || {
        ground.lines() == ["let go"]
    });
}

#[test]
fn a_program_that_is_not_there_is_told() {
    let ground = Ground::new();
    let session = json!({"hooks.slackwater.dev/session": r#"["/no/such/program"]"#});
    ground.pods("shop", &[pod("db-0", session)]);
    let told = failed(ground.quiesce());
    assert!(told.contains("before it printed READY"), "{told}");
}

#[test]
fn a_lost_connection_fails_the_look_and_releases_the_application() {
    let ground = Ground::with(GOOD, json!({}));
    let mut held = ground.quiesce().unwrap();
    held.verify().unwrap();
    ground.server.cut_off();
    eventually("the loss is seen", || held.verify().is_err());
    assert!(failed(held.verify()).contains("connection loss"));
    eventually("it's released all the same", || {
        ground.lines() == ["released"]
    });
    assert!(failed(held.release()).contains("connection loss"));
}

#[test]
fn dropped_sessions_release() {
    let ground = Ground::with(GOOD, json!({}));
    drop(ground.quiesce().unwrap());
    assert_eq!(ground.lines(), ["released"]);
}

#[test]
fn what_is_silent_past_its_deadline_counts_no_more() {
    // It says that it releases after `{seconds}`; it doesn't, and nobody can see what it does.
    let script = "echo {seconds} >> LOG; echo READY; cat > /dev/null";
    let ground = Ground::with(script, json!({"hooks.slackwater.dev/timeout": "20s"}));
    let mut held = ground.quiesce().unwrap();
    held.verify().unwrap();
    assert_eq!(ground.lines(), ["20"]);
    eventually("its deadline passes", || held.verify().is_err());
    assert!(failed(held.verify()).contains("its own deadline (20 s)"));
}

#[test]
fn a_session_that_does_not_end_proves_nothing() {
    let ground = Ground::with("echo READY; exec sleep 40", json!({}));
    let hooks = ground.hooks().with_grace(Duration::from_millis(200));
    let mut held = hooks.quiesce(&["shop/db-0/main".into()], LONG).unwrap();
    held.verify().unwrap();
    let told = failed(held.release());
    assert!(
        told.contains("is unknown whether its application was quiesced"),
        "{told}"
    );
}

#[test]
fn one_that_fails_releases_all_others() {
    let ground = Ground::new();
    let session = |script: &str| json!({"hooks.slackwater.dev/session": ground.session(script)});
    let pods = [pod("a", session(GOOD)), pod("b", session("exit 3"))];
    ground.pods("shop", &pods);
    let names = ["shop/a/main".to_string(), "shop/b/main".into()];
    let told = failed(ground.hooks().quiesce(&names, LONG));
    assert!(
        told.contains("shop/b/main") && told.contains("exit status: 3"),
        "{told}"
    );
    eventually("the other is released", || ground.lines() == ["released"]);
}

#[test]
fn what_is_forbidden_names_the_role_to_bind() {
    let ground = Ground::with(GOOD, json!({}));
    ground
        .server
        .forbid("/api/v1/namespaces/shop/pods/db-0/exec");
    let told = failed(ground.quiesce());
    for word in [
        "forbidden",
        "ClusterRole slackwater-hooks",
        "namespace shop",
    ] {
        assert!(told.contains(word), "{told}");
    }
    ground.server.forbid("/api/v1/namespaces/shop/pods");
    let told = failed(ground.hooks().wanted(&[target("data")], SharedVolume::All));
    assert!(told.contains("ClusterRole slackwater-hooks"), "{told}");
    // As the chart names them in a release of another name.
    let hooks = ground.hooks().with_rights(HookRights {
        role: "disks-slackwater-hooks".into(),
        account: "storage:disks-slackwater-controller".into(),
    });
    for told in [
        failed(hooks.wanted(&[target("data")], SharedVolume::All)),
        failed(hooks.quiesce(&["shop/db-0/main".into()], LONG)),
    ] {
        for word in [
            "ClusterRole disks-slackwater-hooks",
            "ServiceAccount storage:disks-slackwater-controller",
        ] {
            assert!(told.contains(word), "{told}");
        }
    }
}

#[test]
fn hooks_are_those_of_running_pods_that_use_the_claim() {
    let ground = Ground::new();
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
    ground.pods("shop", &pods);
    let hooks = ground.hooks();
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
    // A generic ephemeral volume's claim is POD-VOLUME.
    assert_eq!(
        wanted("db-scratch", SharedVolume::Fail).unwrap(),
        ["shop/db/main"]
    );
    assert_eq!(wanted("nobodys", SharedVolume::Fail).unwrap(), [""; 0]);
    // Of several volumes each hook once, and pods of a namespace are listed once.
    let before = ground.server.asked("fieldSelector");
    let three = [target("data"), target("logs"), target("db-scratch")];
    let all = hooks.wanted(&three, SharedVolume::All).unwrap();
    assert_eq!(all, ["shop/db/main", "shop/other/main", "shop/web/early"]);
    assert_eq!(ground.server.asked("fieldSelector") - before, 1);
    // A claim may say skip, and only that.
    let claim = |annotations: Value| {
        let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "shop", "annotations": annotations}});
        ground
            .server
            .put("/api/v1/namespaces/shop/persistentvolumeclaims/data", claim);
    };
    claim(json!({"hooks.slackwater.dev/session": r#"["/bin/evil"]"#}));
    assert_eq!(wanted("data", SharedVolume::All).unwrap(), both);
    claim(json!({"hooks.slackwater.dev/skip": "true"}));
    assert_eq!(wanted("data", SharedVolume::Fail).unwrap(), [""; 0]);
    claim(json!({"hooks.slackwater.dev/skip": "yes"}));
    let told = failed(wanted("data", SharedVolume::All));
    assert!(
        told.contains("claim shop/data") && told.contains("/skip"),
        "{told}"
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
        let ground = Ground::new();
        let name = format!("hooks.slackwater.dev/{name}");
        let mut annotations = json!({"hooks.slackwater.dev/session": r#"["hold"]"#});
        annotations[&name] = value.into();
        ground.pods("shop", &[pod("db-0", annotations)]);
        let told = failed(ground.hooks().wanted(&[target("data")], SharedVolume::All));
        assert!(told.contains("pod shop/db-0"), "{told}");
        assert!(told.contains(&format!("annotation {name}")), "{told}");
    }
}

#[test]
fn annotations_that_changed_since_are_not_run() {
    let ground = Ground::with(GOOD, json!({}));
    let hooks = ground.hooks();
    let names = hooks.wanted(&[target("data")], SharedVolume::All).unwrap();
    ground.pods("shop", &[pod("db-0", json!({}))]);
    assert!(failed(hooks.quiesce(&names, LONG)).contains("have changed"));
}
