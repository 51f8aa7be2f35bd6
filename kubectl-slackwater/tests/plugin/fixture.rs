//! An API server with objects of a small shop, and the plugin.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use slackwater_testkit::plane::Plane;

/// The driver.
pub const DRIVER: &str = "csi.slackwater.dev";
/// Pools of node-1 and node-2, and one whose agent does not answer.
pub const POOLS: [&str; 3] = [
    "11111111-2222-4333-8444-000000000001",
    "11111111-2222-4333-8444-000000000002",
    "11111111-2222-4333-8444-000000000003",
];
const GIB: i64 = 1 << 30;
/// Nothing here takes as long, unless it hangs. The machine may be busy.
pub const LONG: Duration = Duration::from_secs(120);

pub struct World {
    pub plane: Plane,
}

/// An ID of a volume or a snapshot.
pub fn id(pool: usize, n: u8) -> String {
    format!("{}.00000000-0000-4000-8000-{n:012}", POOLS[pool])
}

/// The status of a VolumeGroupSnapshotContent that lists these snapshots.
pub fn listed(handles: &[String]) -> Value {
    let each = handles.iter().map(|it| json!({"snapshotHandle": it}));
    json!({"volumeSnapshotInfoList": each.collect::<Vec<_>>()})
}

/// When a pool was reported that is reported now. It is in the future, so that a slow test does not outdate it.
pub fn now_seen() -> String {
    days_ago(-1)
}

/// A time of some days ago, so that its age is the same in each run.
pub fn days_ago(days: i64) -> String {
    (Timestamp::now() - SignedDuration::from_hours(24 * days + 1)).to_string()
}

impl World {
    pub fn start(what: &str) -> Option<World> {
        let plane = Plane::start(what)?;
        plane.apply(include_str!("../../../deploy/chart/crds/pools.yaml"));
        plane.apply(include_str!("../../../deploy/chart/crds/volumemoves.yaml"));
        plane.apply(include_str!(
            "../../../deploy/chart/crds/snapshotschedules.yaml"
        ));
        plane.apply(include_str!(
            "../../../deploy/chart/crds/volumereverts.yaml"
        ));
        plane.apply(include_str!("../../../deploy/chart/crds/httpsources.yaml"));
        let crds = plane
            .program()
            .ancestors()
            .nth(2)
            .unwrap()
            .join("manifests/crd");
        plane.kubectl(&["apply", "--server-side", "-f", crds.to_str().unwrap()]);
        plane.kubectl(&["wait", "--for=condition=Established", "--all", "crd"]);
        for namespace in ["shop", "other"] {
            plane.kubectl(&["create", "namespace", namespace]);
        }
        Some(World { plane })
    }

    /// Creates an object, with its status.
    pub fn put(&self, object: Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let (api_version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let resource = ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: api_version.clone(),
            plural: format!("{}s", kind.to_lowercase()),
            kind,
        };
        let client = self.plane.client();
        let api: Api<DynamicObject> = match object["metadata"]["namespace"].as_str() {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        };
        let status = object["status"].clone();
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        self.plane.runtime.block_on(async {
            let made = api.create(&PostParams::default(), &object).await.unwrap();
            if !status.is_null() {
                let status = Patch::Merge(json!({ "status": status }));
                let name = made.metadata.name.unwrap();
                let params = PatchParams::default();
                api.patch_status(&name, &params, &status).await.unwrap();
            }
        });
    }

    /// Writes a part of the status of an object, as its controller does.
    pub fn status(&self, resource: &str, status: Value) {
        let patch = json!({ "status": status }).to_string();
        let words = [
            "patch",
            "-n",
            "shop",
            resource,
            "--subresource=status",
            "--type=merge",
            "-p",
            &patch,
        ];
        self.plane.kubectl(&words);
    }

    /// The plugin with these arguments.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-slackwater"));
        command
            .arg(format!(
                "--kubeconfig={}",
                self.plane.path("kubeconfig").display()
            ))
            .args(words)
            .env_remove("NO_COLOR");
        command
    }

    /// What it prints, with its exit code, and without what differs from run to run.
    pub fn says(&self, words: &[&str]) -> String {
        said(words, &self.command(words).output().unwrap())
    }

    /// A command with `--wait` that creates the object of this resource which the filter of jsonpath
    /// selects, while its controller writes these parts of the status.
    pub fn followed(
        &self,
        words: &[&str],
        (resource, filter): (&str, &str),
        states: &[Value],
    ) -> String {
        let mut command = self.command(words);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut progress = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = vec![progress.next().unwrap().unwrap()];
        let start = Instant::now();
        let name = loop {
            let jsonpath = format!("jsonpath={{.items[?({filter})].metadata.name}}");
            let found = self
                .plane
                .kubectl(&["get", resource, "-n", "shop", "-o", &jsonpath]);
            if !found.is_empty() {
                break found;
            }
            assert!(start.elapsed() < LONG, "no object was created");
        };
        for state in states {
            self.status(&format!("{resource}/{name}"), state.clone());
            seen.extend(progress.next().map(Result::unwrap));
        }
        let mut output = child.wait_with_output().unwrap();
        output.stderr = (seen.join("\n") + "\n").into_bytes();
        said(words, &output).replace(&name, "NAME")
    }

    /// The objects of the shop.
    pub fn fill(&self) {
        self.pools();
        self.volume("shop", "data-pg-0", 0, 1, 20);
        self.volume("shop", "data-pg-1", 1, 2, 20);
        self.volume("shop", "cache", 0, 3, 5);
        self.volume("other", "files", 0, 4, 40);
        self.put(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "foreign", "namespace": "shop", "annotations": {
                "volume.kubernetes.io/storage-provisioner": "csi.example.org"}},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}));
        self.put(
            json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pvc-9"},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater",
                "capacity": {"storage": "7Gi"}, "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": "shop", "name": "gone"},
                "csi": {"driver": DRIVER, "volumeHandle": id(1, 9)}},
            "status": {"phase": "Released"}}),
        );
        self.pod();
        self.snapshots();
        self.put(
            json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeMove",
            "metadata": {"name": "cache-away", "namespace": "shop"},
            "spec": {"claim": "cache", "to": {"node": "node-2"}},
            "status": {"phase": "Copying", "from": {"node": "node-1"}, "to": {"node": "node-2"},
                "bytesDone": GIB, "bytesTotal": 5 * GIB}}),
        );
        self.put(json!({"apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": "warning", "namespace": "shop"},
            "regarding": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "shop",
                "name": "data-pg-0"},
            "type": "Warning", "reason": "SnapshotLevel", "action": "none",
            "note": "hostile \u{1b}[2J text", "reportingController": DRIVER,
            "reportingInstance": "router", "eventTime": format!("{:.6}", Timestamp::now() - SignedDuration::from_mins(10))}));
    }

    fn pools(&self) {
        // The first one is reported, and the others were days ago.
        let seen = [now_seen(), days_ago(3), days_ago(3)];
        let pool = |n: usize, node: &str, health: &str, message: &str, free: i64| {
            json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
            "metadata": {"name": POOLS[n], "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": {},
            "status": {"node": node, "name": "default", "kind": "file", "home": format!("home-{n}"),
                "place": "file:/srv/pool", "fileSystem": "xfs", "mount": "/dev/sdb1",
                "capacity": "100 GiB", "available": "x", "totalBytes": 100 * GIB,
                "availableBytes": free * GIB, "promisedBytes": 65 * GIB, "volumes": 3,
                "snapshots": 2, "health": health, "message": message,
                "lastSeen": seen[n]}})
        };
        self.put(pool(0, "node-1", "Healthy", "", 12));
        self.put(pool(1, "node-2", "Healthy", "", 80));
        let message = "the agent of node node-3 does not answer\u{1b}]0;x\u{7}";
        self.put(pool(2, "node-3", "Unreachable", message, 50));
        // A pool of another driver.
        let mut foreign = pool(2, "node-4", "Healthy", "", 1);
        foreign["metadata"]["name"] = json!("11111111-2222-4333-8444-000000000004");
        foreign["metadata"]["labels"] = json!({"slackwater.dev/driver": "csi.example.org"});
        self.put(foreign);
    }

    /// A claim with its volume.
    pub fn volume(&self, namespace: &str, claim: &str, pool: usize, n: u8, size: i64) {
        let (pv, size) = (format!("pvc-{n}"), format!("{size}Gi"));
        self.put(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace, "labels": {"n": n.to_string()},
                "annotations": {"volume.kubernetes.io/storage-provisioner": DRIVER}},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater", "volumeName": pv,
                "resources": {"requests": {"storage": size}}},
            "status": {"phase": "Bound", "capacity": {"storage": size}}}));
        self.put(
            json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": pv},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater",
                "capacity": {"storage": size}, "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": {"namespace": namespace, "name": claim},
                "csi": {"driver": DRIVER, "volumeHandle": id(pool, n)}},
            "status": {"phase": "Bound"}}),
        );
    }

    /// Deletes a claim, which no controller of this world does.
    pub fn remove_claim(&self, namespace: &str, name: &str) {
        let claim = format!("pvc/{name}");
        self.plane
            .kubectl(&["delete", "-n", namespace, &claim, "--wait=false"]);
        let none = "{\"metadata\":{\"finalizers\":null}}";
        self.plane
            .kubectl(&["patch", "-n", namespace, &claim, "--type=merge", "-p", none]);
    }

    fn pod(&self) {
        self.put(json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "pg-0", "namespace": "shop"},
            "spec": {"nodeName": "node-1",
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data-pg-0"}}],
                "containers": [{"name": "postgres", "image": "x", "volumeMounts": [
                    {"name": "data", "mountPath": "/var/lib/postgresql"}]}]},
            "status": {"phase": "Running"}}));
    }

    /// A group of two members, and a snapshot that failed.
    fn snapshots(&self) {
        let group = "groupsnapshot.storage.k8s.io/v1beta2";
        let noted = |level: &str, reason: &str| {
            let mut noted = json!({"slackwater.dev/level": level, "slackwater.dev/cut-at": days_ago(2),
                "slackwater.dev/reason": reason, "slackwater.dev/frozen-ms": "17"});
            if level == "application" {
                noted["slackwater.dev/held-ms"] = json!("230");
            }
            noted
        };
        self.put(json!({"apiVersion": group, "kind": "VolumeGroupSnapshot",
            "metadata": {"name": "nightly-2", "namespace": "shop"},
            "spec": {"source": {"selector": {"matchLabels": {"app": "pg"}}}},
            "status": {"boundVolumeGroupSnapshotContentName": "group-content", "readyToUse": true}}));
        self.put(
            json!({"apiVersion": group, "kind": "VolumeGroupSnapshotContent",
            "metadata": {"name": "group-content", "annotations": noted("application", "")},
            "spec": {"deletionPolicy": "Delete", "driver": DRIVER,
                "source": {"volumeHandles": [id(0, 1), id(1, 2)]},
                "volumeGroupSnapshotRef": {"name": "nightly-2", "namespace": "shop"}},
            "status": listed(&[id(0, 101), id(1, 102)])}),
        );
        for (name, claim, pool, n) in [
            ("nightly-2-a", "data-pg-0", 0, 1),
            ("nightly-2-b", "data-pg-1", 1, 2),
        ] {
            self.snapshot(
                name,
                claim,
                &id(pool, 100 + n),
                json!({}),
                json!({
                "volumeGroupSnapshotName": "nightly-2", "readyToUse": true, "restoreSize": "20Gi"}),
            );
        }
        let noted = noted(
            "filesystem",
            "the hook of pod shop/pg-0 did not keep its application quiesced",
        );
        self.snapshot(
            "before-upgrade",
            "data-pg-0",
            &id(0, 120),
            noted,
            json!({
            "readyToUse": true, "restoreSize": "20Gi"}),
        );
        self.snapshot(
            "failed",
            "cache",
            "",
            json!({}),
            json!({
            "readyToUse": false, "error": {"message": "RESOURCE_EXHAUSTED: the pool has no room"}}),
        );
    }

    pub fn snapshot(&self, name: &str, claim: &str, handle: &str, noted: Value, mut status: Value) {
        let content = format!("content-{name}");
        status["boundVolumeSnapshotContentName"] = json!(content);
        self.put(
            json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"source": {"persistentVolumeClaimName": claim}}, "status": status}),
        );
        let status = (!handle.is_empty()).then(|| json!({"snapshotHandle": handle}));
        self.put(json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": content, "annotations": noted},
            "spec": {"deletionPolicy": "Delete", "driver": DRIVER, "source": {"volumeHandle": id(0, 1)},
                "volumeSnapshotRef": {"name": name, "namespace": "shop"}},
            "status": status}));
    }

    /// A user who may read the objects of one namespace.
    pub fn user_of_shop(&self) {
        self.plane.apply(
            "apiVersion: rbac.authorization.k8s.io/v1\n\
             kind: Role\n\
             metadata: {name: developer, namespace: shop}\n\
             rules:\n\
             - {apiGroups: [''], resources: [persistentvolumeclaims, pods], verbs: [get, list, watch]}\n\
             - {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots], verbs: [get, list]}\n\
             ---\n\
             apiVersion: rbac.authorization.k8s.io/v1\n\
             kind: RoleBinding\n\
             metadata: {name: developer, namespace: shop}\n\
             roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: developer}\n\
             subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]\n",
        );
    }
}

/// What a program says while it waits for controllers, or when one of them has changed an object before it did:
/// whether it does depends on their speed.
const WAITS: [&str; 5] = [
    "is being",
    "is not ready yet",
    "volumes exist; claim",
    "it is read again",
    "has changed since",
];

/// Texts of [`said`] without lines about waiting.
pub fn without_waits(text: &str) -> String {
    let waits = |line: &str| line.starts_with("! ") && WAITS.iter().any(|one| line.contains(one));
    let lines = text.lines().filter(|line| !waits(line));
    lines.map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// The command, its output and its exit code as text. Times, ages in seconds and the widths of columns
/// differ from run to run.
pub fn said(words: &[&str], output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut all = format!("$ kubectl slackwater {}\n", words.join(" "));
    for (stream, text) in [("", text(&output.stdout)), ("! ", text(&output.stderr))] {
        for line in text.lines() {
            let indent = line.len() - line.trim_start().len();
            let cells = line.trim().split("   ").filter(|cell| !cell.is_empty());
            let cells = cells.map(|cell| plain(cell.trim()));
            let line = cells.collect::<Vec<_>>().join("   ");
            let line = match line.split_once(" exists since ") {
                Some((claim, rest)) => {
                    let (_, rest) = rest.split_once(": ").unwrap();
                    format!("{claim} exists since TIME: {rest}")
                }
                None => line,
            };
            all.push_str(&format!("{stream}{}{line}", " ".repeat(indent)));
            all.push('\n');
        }
    }
    format!("{all}exit code {}\n", output.status.code().unwrap())
}

fn plain(cell: &str) -> String {
    if cell.parse::<Timestamp>().is_ok() {
        return "TIME".into();
    }
    let is_age = |number: &str| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    match cell.strip_suffix(['s', 'm']) {
        Some(number) if is_age(number) => "AGE".into(),
        _ => cell.into(),
    }
}

/// The characters that the API server adds to `generateName` differ from run to run.
pub fn without_suffix(text: &str, prefix: &str) -> String {
    let mut plain = String::new();
    for (n, part) in text.split(prefix).enumerate() {
        let has_suffix = n > 0;
        if has_suffix {
            plain.push_str(prefix);
            plain.push_str("SUFFIX");
        }
        plain.push_str(if has_suffix { &part[5..] } else { part });
    }
    plain
}
