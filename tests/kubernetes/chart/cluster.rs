//! How the chart adapts to the cluster that it is installed in: to its version, and to an existing
//! CSIDriver, of which Kubernetes never changes two fields. The cluster is simulated by a few
//! answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use serde_json::{Value, json};

use super::{chart, helm, rendered};

const DRIVER: &str = "/apis/storage.k8s.io/v1/csidrivers/csi.slackwater.dev";

/// API versions and kinds of the objects that the chart renders.
fn kinds(text: &str) -> BTreeSet<(String, String)> {
    let word = |object: &str, key: &str| {
        let mut lines = object.lines();
        lines.find_map(|line| line.strip_prefix(key).map(str::to_string))
    };
    let objects = text.split("\n---\n");
    objects
        .filter_map(|one| Some((word(one, "apiVersion: ")?, word(one, "kind: ")?)))
        .collect()
}

/// Answers by path, of a cluster that knows these kinds, and optionally has a CSIDriver.
fn answers(
    kinds: &BTreeSet<(String, String)>,
    driver: Option<(bool, &[&str])>,
) -> BTreeMap<String, Value> {
    let mut answers = BTreeMap::from([
        (
            "/version".to_string(),
            json!({ "major": "1", "minor": "35", "gitVersion": "v1.35.0" }),
        ),
        (
            "/api".to_string(),
            json!({ "kind": "APIVersions", "versions": ["v1"] }),
        ),
    ]);
    let mut groups = Vec::new();
    let versions: BTreeSet<_> = kinds.iter().map(|(version, _)| version).collect();
    for group_version in versions {
        let resources: Vec<_> = kinds
            .iter()
            .filter(|(version, _)| version == group_version)
            .map(|(_, kind)| {
                let singular = kind.to_lowercase();
                json!({
                    "name": format!("{singular}s"), "singularName": singular, "kind": kind,
                    "namespaced": false, "verbs": ["get"],
                })
            })
            .collect();
        let path = match group_version.split_once('/') {
            None => format!("/api/{group_version}"),
            Some((group, version)) => {
                let it = json!({ "groupVersion": group_version, "version": version });
                groups.push(json!({ "name": group, "versions": [it], "preferredVersion": it }));
                format!("/apis/{group_version}")
            }
        };
        let list = json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version,
            "resources": resources,
        });
        answers.insert(path, list);
    }
    let list = json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups });
    answers.insert("/apis".to_string(), list);
    if let Some((attach, modes)) = driver {
        let object = json!({
            "kind": "CSIDriver", "apiVersion": "storage.k8s.io/v1",
            // As helm marks the objects that it has installed.
            "metadata": {
                "name": "csi.slackwater.dev",
                "labels": { "app.kubernetes.io/managed-by": "Helm" },
                "annotations": {
                    "meta.helm.sh/release-name": "slackwater",
                    "meta.helm.sh/release-namespace": "slackwater",
                },
            },
            "spec": { "attachRequired": attach, "volumeLifecycleModes": modes },
        });
        answers.insert(DRIVER.to_string(), object);
    }
    answers
}

/// Answers one request; `None` at the end of the connection.
fn answer(stream: &mut BufReader<TcpStream>, answers: &BTreeMap<String, Value>) -> Option<()> {
    let mut first = String::new();
    stream.read_line(&mut first).ok().filter(|read| *read > 0)?;
    let mut line = String::new();
    while stream.read_line(&mut line).ok()? > 2 {
        line.clear();
    }
    let path = first.split(' ').nth(1)?.split('?').next()?;
    let missing = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404 });
    let (status, body) = match answers.get(path) {
        Some(found) => ("200 OK", found.to_string()),
        None => ("404 Not Found", missing.to_string()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let to = stream.get_mut();
    to.write_all(head.as_bytes()).ok()?;
    to.write_all(body.as_bytes()).ok()
}

/// The chart rendered in such a cluster, or the error; `None` without helm.
fn installed(driver: Option<(bool, &[&str])>, words: &[&str]) -> Option<Result<String, String>> {
    let all = rendered(&["--set=csiDriver.attach=true"])?;
    let kinds = kinds(&String::from_utf8_lossy(&all.stdout));
    let answers = answers(&kinds, driver);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answers = answers.clone();
            std::thread::spawn(move || {
                let mut stream = BufReader::new(stream);
                while answer(&mut stream, &answers).is_some() {}
            });
        }
    });
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let file = folder.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{ "name": "a", "cluster": { "server": format!("http://{address}") } }],
        "users": [{ "name": "a", "user": {} }],
        "contexts": [{ "name": "a", "context": { "cluster": "a", "user": "a" } }],
    });
    std::fs::write(&file, config.to_string()).expect("written");
    let (chart, file) = (chart(), file.to_string_lossy().into_owned());
    let chart = chart.to_string_lossy();
    let mut all = vec!["template", "slackwater", &chart, "--namespace=slackwater"];
    all.extend(["--dry-run=server", "--disable-openapi-validation"]);
    all.extend(["--skip-crds", "--kubeconfig", &file]);
    all.extend(words);
    let output = helm(&all)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some(match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    })
}

/// Whether volumes are attached, and whether pods may have inline volumes, consistently in all
/// objects.
fn fields(text: &str) -> (bool, bool) {
    let attach = text.contains("attachRequired: true");
    assert_ne!(attach, text.contains("attachRequired: false"));
    assert_eq!(attach, text.contains("- name: attacher\n"));
    assert_eq!(
        attach,
        text.contains("resources: [volumeattachments/status]")
    );
    let inline = text.contains("    - Ephemeral\n");
    assert_eq!(inline, text.contains("--inline-max-size=10Gi"));
    (attach, inline)
}

#[test]
fn fields_of_the_driver_object_that_never_change_are_kept() {
    let both: &[&str] = &["Persistent", "Ephemeral"];
    let one: &[&str] = &["Persistent"];
    let cases = [
        (None, (false, false)),
        (Some((true, both)), (true, true)),
        (Some((true, one)), (true, false)),
        (Some((false, both)), (false, true)),
        (Some((false, one)), (false, false)),
    ];
    for (driver, expected) in cases {
        let Some(text) = installed(driver, &[]) else {
            return;
        };
        let text = text.unwrap_or_else(|error| panic!("{driver:?}: {error}"));
        assert_eq!(fields(&text), expected, "{driver:?}");
    }
    let arguments = ["--set=csiDriver.attach=true,csiDriver.inlineEphemeral=true"];
    let text = installed(None, &arguments)
        .expect("helm is available")
        .expect("taken");
    assert_eq!(fields(&text), (true, true));
    for (field, value) in [("attach", "false"), ("inlineEphemeral", "false")] {
        let set = format!("--set=csiDriver.{field}={value}");
        let error = installed(Some((true, both)), &[&set]).expect("helm is available");
        let error = error.expect_err("the API server would refuse it");
        for word in [&format!("csiDriver.{field}"), "auto", "docs/operations.md"] {
            assert!(error.contains(word), "{error}");
        }
    }
}

#[test]
fn a_cluster_that_cannot_be_served_is_refused() {
    let cases: [(&[&str], &[&str]); 2] = [
        (
            &["--kube-version=1.29.14"],
            &["certificates.mode", "1.30", "v1.29.14"],
        ),
        (
            &["--kube-version=1.29.14", "--set=certificates.mode=existing"],
            &["admissionPolicy", "set it to false"],
        ),
    ];
    for (words, reported) in cases {
        let Some(output) = rendered(words) else {
            return;
        };
        assert!(!output.status.success(), "{words:?} is accepted");
        let error = String::from_utf8_lossy(&output.stderr);
        for word in reported {
            assert!(error.contains(word), "{words:?}: {error}");
        }
    }
    let taken: [&[&str]; 3] = [
        &["--kube-version=1.30.0"],
        &["--kube-version=v1.30.4-gke.1"],
        &[
            "--kube-version=1.29.14",
            "--set=certificates.mode=existing,admissionPolicy=false",
        ],
    ];
    for words in taken {
        let output = rendered(words).expect("helm is available");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {error}");
    }
}
