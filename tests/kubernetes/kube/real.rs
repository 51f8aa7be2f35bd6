//! Hooks by exec through a real API server, kubelet and container runtime: the cluster of `make
//! cluster`, if it runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use slackwater::error::chain;
use slackwater::hook::{Hooks, PodHooks};
use slackwater_testkit::eventually;
use tokio::runtime::Runtime;

/// Nothing here takes as long, unless it hangs. The machine may be busy.
const LONG: Duration = Duration::from_secs(120);
const IMAGE: &str = "docker.io/library/busybox:latest";

/// A namespace of the running cluster, which is deleted when this is dropped.
struct Place {
    hyper: PathBuf,
    kubeconfig: PathBuf,
    namespace: String,
}

impl Place {
    fn new() -> Option<Place> {
        let cache = match std::env::var_os("CLUSTER_CACHE") {
            Some(cache) => PathBuf::from(cache),
            None => Path::new(&std::env::var_os("HOME")?).join(".cache/slackwater-cluster"),
        };
        let skipped = || {
            slackwater_testkit::left_out(
                "hooks on a real kubelet: no cluster runs here (make cluster)",
            );
            None
        };
        let hyper = cache.join("bin/hyper");
        let kubeconfig = cache.join("state/kubeconfig");
        if !hyper.exists() || !kubeconfig.exists() {
            return skipped();
        }
        let place = Place {
            hyper,
            kubeconfig,
            namespace: format!("slackwater-exec-{}", uuid::Uuid::new_v4().simple()),
        };
        let ready = ["get", "nodes", "--request-timeout=10s", "--no-headers"];
        if place.kubectl(&ready).is_err() {
            return skipped();
        }
        place
            .kubectl(&["create", "namespace", &place.namespace])
            .unwrap();
        Some(place)
    }

    fn kubectl(&self, words: &[&str]) -> Result<String, String> {
        let output = Command::new(&self.hyper)
            .args(["kubectl", "--kubeconfig"])
            .arg(&self.kubeconfig)
            .args(words)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// A running pod with this session.
    fn pod(&self, name: &str, script: &str) {
        let session = json!(["/bin/sh", "-c", script]).to_string();
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "annotations": {
                "hooks.slackwater.dev/session": session,
                "hooks.slackwater.dev/timeout": "300s",
            }},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "main", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "3600"]}],
            },
        });
        let file = tempfile::Builder::new()
            .prefix("slackwater-pod-")
            .tempfile()
            .unwrap();
        std::fs::write(file.path(), pod.to_string()).unwrap();
        self.kubectl(&["apply", "-f", file.path().to_str().unwrap()])
            .unwrap();
        let wait = [
            "wait",
            "--for=condition=Ready",
            "--timeout=300s",
            "-n",
            &self.namespace,
        ];
        self.kubectl(&[&wait[..], &[&format!("pod/{name}")]].concat())
            .unwrap();
    }

    /// The log of the sessions in a pod.
    fn log(&self, name: &str) -> String {
        let words = ["exec", "-n", &self.namespace, name, "--", "cat", "/tmp/log"];
        self.kubectl(&words).unwrap_or_default()
    }

    fn hooks(&self, runtime: &Runtime) -> PodHooks {
        let client = runtime.block_on(async {
            let kubeconfig = kube::config::Kubeconfig::read_from(&self.kubeconfig).unwrap();
            let options = kube::config::KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await;
            kube::Client::try_from(config.unwrap()).unwrap()
        });
        let _inside = runtime.enter();
        PodHooks::new(client)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.kubectl(&["delete", "namespace", &self.namespace, "--wait=false"]);
    }
}

#[test]
fn a_real_kubelet_keeps_stdin_open_closes_it_and_reports_the_status() {
    let Some(place) = Place::new() else { return };
    let runtime = Runtime::new().unwrap();
    let hooks = place.hooks(&runtime);
    let name = |pod: &str| vec![format!("{}/{pod}/main", place.namespace)];

    let good = "echo READY; cat > /dev/null; echo released >> /tmp/log; echo more; sleep 0.2";
    place.pod("good", good);
    let mut held = hooks.quiesce(&name("good"), LONG).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    held.verify().unwrap();
    assert_eq!(
        place.log("good"),
        "",
        "the session holds as long as its stdin is open"
    );
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(place.log("good"), "released\n");

    place.pod(
        "bad",
        "echo READY; cat > /dev/null; echo it was lost >&2; exit 7",
    );
    let mut held = hooks.quiesce(&name("bad"), LONG).unwrap();
    held.verify().unwrap();
    let message = chain(&held.release().unwrap_err());
    assert!(
        message.contains("exit status: 7") && message.contains("it was lost"),
        "{message}"
    );

    // A router that is killed: all its connections close at once.
    let dying = Runtime::new().unwrap();
    let held = place.hooks(&dying).quiesce(&name("good"), LONG).unwrap();
    dying.shutdown_background();
    eventually("the application is released", || {
        place.log("good") == "released\nreleased\n"
    });
    drop(held);

    // A pod that is killed.
    let mut held = hooks.quiesce(&name("good"), LONG).unwrap();
    let delete = ["delete", "pod", "good", "--force", "-n", &place.namespace];
    place.kubectl(&delete).unwrap();
    eventually("the pod's death is seen", || held.verify().is_err());
    eprintln!("{}", chain(&held.verify().unwrap_err()));
}
