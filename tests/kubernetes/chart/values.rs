//! Values: the schema knows each of them, each changes the rendered objects, and invalid ones are
//! refused with a message that names them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use slackwater_testkit::Sweep;

use super::{read, rendered};

/// A value by its path, a value other than the default, and the values that must be set for it to
/// have an effect. A free-form group counts as one value.
type Change = (&'static str, &'static str, &'static [&'static str]);

const EXISTING: &[&str] = &["--set=certificates.mode=existing"];
const CERT_MANAGER: &[&str] = &[
    "--set=certificates.mode=cert-manager",
    "--set=certificates.nodes={node-1}",
];
const MONITOR: &[&str] = &["--set=metrics.serviceMonitor.create=true"];
const RULES: &[&str] = &["--set=metrics.prometheusRule.create=true"];
const DASHBOARD: &[&str] = &["--set=metrics.dashboard.create=true"];
const SIDECARS: &[&str] = &["--set=metrics.sidecars.create=true"];
const METADATA: &[&str] = &[
    "--set=snapshotMetadata.create=true",
    "--set=snapshotMetadata.caCert=BEGIN CERTIFICATE",
];
const AUTHORITY: &[&str] = &["--set=snapshotMetadata.caCert=BEGIN CERTIFICATE"];
const ISSUER: &[&str] = &[
    "--set=certificates.mode=cert-manager",
    "--set=certificates.nodes={node-1}",
    "--set=certificates.issuerRef.name=ours",
];
const POOL: &[&str] = &["--set=pools[0].name=a,pools[0].path=/disks/a"];
const LVM_POOL: &[&str] = &["--set=pools[0].name=a,pools[0].lvm=vg/pool,pools[0].path=null"];

const RECREATE: &[&str] = &["--set=onNodeLost.recreate=true"];
const ATTACH: &[&str] = &["--set=csiDriver.attach=true"];
const INLINE: &[&str] = &["--set=csiDriver.inlineEphemeral=true"];
const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

const PAGE: &[&str] = &["--set=page.create=true"];
const POPULATORS: &[&str] = &[
    "--set=populators.create=true",
    "--set=populators.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
];
const OTHER_DIGEST: &str =
    "sha256:1123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

const CHANGES: &[Change] = &[
    ("global.imageRegistry", "registry.example.org/mirror", &[]),
    ("driverName", "csi.example.org", &[]),
    ("image.repository", "registry.example.org/disks", &[]),
    ("image.tag", "1.2.3", &[]),
    ("image.digest", DIGEST, &[]),
    ("image.pullPolicy", "Always", &[]),
    ("imagePullSecrets", "{}", &[]),
    ("pools[0].name", "fast", POOL),
    ("pools[0].path", "/disks/fast", POOL),
    ("pools[0].lvm", "vg/fast", LVM_POOL),
    ("pools[0].init", "true", POOL),
    ("pools[0].image", "20Gi", POOL),
    ("pools[0].mount", "any", POOL),
    ("pools[0].overcommit", "3", POOL),
    ("pools[0].snapshots", "best-effort", POOL),
    ("pools[0].extent", "64Ki", POOL),
    ("pools[0].trim", "7d", POOL),
    ("pools[0].rawBlock", "unfiltered", LVM_POOL),
    ("kubeletDir", "/var/snap/kubelet", &[]),
    ("logFormat", "text", &[]),
    ("logLevel", "debug", &[]),
    ("alpha", "{health}", &[]),
    ("poolLostAfter", "30d", &[]),
    ("onNodeLost.recreate", "true", &[]),
    ("onNodeLost.readyFor", "10m", RECREATE),
    ("csiDriver.attach", "true", &[]),
    ("csiDriver.inlineEphemeral", "true", &[]),
    ("csiDriver.inlineMaxSize", "20Gi", INLINE),
    ("node.maxVolumes", "100", &[]),
    ("node.copyRate", "100Mi", &[]),
    ("node.importPaths", "{/opt/local-path-provisioner}", &[]),
    ("certificates.mode", "existing", &[]),
    ("certificates.controllerSecret", "ours", EXISTING),
    ("certificates.nodeSecret", "ours", EXISTING),
    ("certificates.nodes", "{node-1,node-2}", CERT_MANAGER),
    ("certificates.issuerRef.name", "ours", CERT_MANAGER),
    ("certificates.issuerRef.kind", "ClusterIssuer", ISSUER),
    ("certificates.issuerRef.group", "example.org", ISSUER),
    ("controller.replicas", "3", &[]),
    ("controller.podDisruptionBudget", "false", &[]),
    ("controller.priorityClassName", "high", &[]),
    ("controller.nodeSelector", "a=b", &[]),
    ("controller.tolerations", "{}", &[]),
    ("controller.affinity", "nodeAffinity.a=b", &[]),
    ("controller.resources", "limits.memory=1Gi", &[]),
    ("controller.podAnnotations", "a=b", &[]),
    ("node.nodeSelector", "a=b", &[]),
    ("node.tolerations", "{}", &[]),
    ("node.affinity", "nodeAffinity.a=b", &[]),
    ("node.priorityClassName", "high", &[]),
    ("node.gracePeriods", "normal", &[]),
    ("node.maxUnavailable", "2", &[]),
    ("node.agentAddress", "[::]", &[]),
    ("node.agentPort", "9830", &[]),
    ("node.peerPort", "9831", &[]),
    ("node.resources", "limits.memory=1Gi", &[]),
    ("node.guardResources", "limits.memory=1Gi", &[]),
    ("node.podAnnotations", "a=b", &[]),
    ("node.seLinuxType", "container_t", &[]),
    ("singleNode", "true", &[]),
    ("sidecars.pullPolicy", "Always", &[]),
    ("sidecars.provisioner.image", "x:1", &[]),
    ("sidecars.attacher.image", "x:1", ATTACH),
    ("sidecars.resizer.image", "x:1", &[]),
    ("sidecars.snapshotter.image", "x:1", &[]),
    ("sidecars.registrar.image", "x:1", &[]),
    ("sidecars.livenessProbe.image", "x:1", &[]),
    ("sidecars.snapshotMetadata.image", "x:1", METADATA),
    ("sidecars.verbosity", "5", &[]),
    ("sidecars.resources", "limits.memory=1Gi", &[]),
    ("snapshots", "false", &[]),
    ("groupSnapshots", "false", &[]),
    ("snapshotMetadata.create", "true", AUTHORITY),
    ("snapshotMetadata.tlsSecret", "ours", METADATA),
    ("snapshotMetadata.caCert", "BEGIN CERTIFICATE 2", METADATA),
    ("snapshotMetadata.audience", "backups", METADATA),
    ("snapshotMetadata.port", "7443", METADATA),
    ("storageClass.create", "false", &[]),
    ("storageClass.name", "disks", &[]),
    ("storageClass.default", "true", &[]),
    ("storageClass.reclaimPolicy", "Retain", &[]),
    ("storageClass.volumeBindingMode", "Immediate", &[]),
    ("storageClass.allowVolumeExpansion", "false", &[]),
    ("storageClass.parameters", "allocation=thick", &[]),
    ("storageClass.mountOptions", "{noatime}", &[]),
    ("volumeSnapshotClass.create", "false", &[]),
    ("volumeSnapshotClass.name", "disks", &[]),
    ("volumeSnapshotClass.default", "true", &[]),
    ("storageClass.labels", "a=b", &[]),
    ("volumeSnapshotClass.labels", "a=b", &[]),
    ("volumeGroupSnapshotClass.labels", "a=b", &[]),
    ("volumeSnapshotClass.deletionPolicy", "Retain", &[]),
    ("volumeSnapshotClass.parameters", "consistency=crash", &[]),
    ("volumeGroupSnapshotClass.create", "false", &[]),
    ("volumeGroupSnapshotClass.name", "disks", &[]),
    ("volumeGroupSnapshotClass.default", "true", &[]),
    ("volumeGroupSnapshotClass.deletionPolicy", "Retain", &[]),
    (
        "volumeGroupSnapshotClass.parameters",
        "consistency=crash",
        &[],
    ),
    ("hooks.namespaces", "{shop}", &[]),
    (
        "populators.create",
        "true",
        &[
            "--set=populators.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        ],
    ),
    (
        "populators.image.repository",
        "registry.example.org/x",
        POPULATORS,
    ),
    ("populators.image.digest", OTHER_DIGEST, POPULATORS),
    ("populators.namespaces", "{shop}", POPULATORS),
    ("populators.privateNetworks", "false", POPULATORS),
    (
        "populators.proxy",
        "http://proxy.example.org:3128",
        POPULATORS,
    ),
    ("populators.caBundle", "BEGIN CERTIFICATE", POPULATORS),
    ("populators.refused", "{10.96.0.0/12}", POPULATORS),
    ("populators.scratchSize", "50Gi", POPULATORS),
    ("populators.rootForBlock", "true", POPULATORS),
    ("populators.maxPods", "2", POPULATORS),
    ("populators.maxPodsPerNamespace", "2", POPULATORS),
    ("populators.cacheSnapshots", "2", POPULATORS),
    ("populators.replicas", "1", POPULATORS),
    ("populators.resources", "limits.memory=1Gi", POPULATORS),
    ("admissionPolicy", "false", &[]),
    ("moves.evict", "true", &[]),
    ("reverts.keepOld", "true", &[]),
    ("schedules.create", "true", &[]),
    ("page.create", "true", &[]),
    ("page.port", "9831", PAGE),
    ("networkPolicy.create", "true", &[]),
    ("udevRule.install", "true", &[]),
    ("openshift.scc", "true", &[]),
    ("metrics.address", "[::]", &[]),
    ("metrics.port", "9811", &[]),
    ("metrics.perVolume", "true", &[]),
    ("metrics.sidecars.create", "true", &[]),
    ("metrics.sidecars.port", "9911", SIDECARS),
    ("metrics.serviceMonitor.create", "true", &[]),
    ("metrics.serviceMonitor.labels", "a=b", MONITOR),
    ("metrics.serviceMonitor.interval", "10s", MONITOR),
    ("metrics.dashboard.create", "true", &[]),
    ("metrics.dashboard.namespace", "monitoring", DASHBOARD),
    ("metrics.dashboard.folder", "Disks", DASHBOARD),
    ("metrics.prometheusRule.create", "true", &[]),
    ("metrics.prometheusRule.labels", "a=b", RULES),
    (
        "metrics.prometheusRule.runbookBase",
        "https://docs.example.org",
        RULES,
    ),
];

/// `--set` for a change. A free-form group is changed by one of its keys.
fn set(path: &str, value: &str) -> String {
    match value.split_once('=') {
        Some((key, value)) => format!("--set={path}.{key}={value}"),
        // The only list whose elements are not words.
        None if value == "{}" && path == "imagePullSecrets" => format!("--set={path}[0].name=x"),
        None if value == "{}" => format!("--set={path}[0].key=x"),
        None => format!("--set={path}={value}"),
    }
}

#[test]
fn every_value_changes_what_is_rendered() {
    let mut before: BTreeMap<&[&str], String> = BTreeMap::new();
    for (path, value, words) in Sweep::requested().part_if_quick(CHANGES.iter()) {
        let render = |words: &[&str]| {
            let output = rendered(words)?;
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{path}: {error}");
            Some(String::from_utf8(output.stdout).expect("text"))
        };
        if !before.contains_key(words) {
            let Some(text) = render(words) else {
                return;
            };
            before.insert(words, text);
        }
        let change = set(path, value);
        let after = render(&[words, &[change.as_str()][..]].concat()).expect("helm is available");
        assert_ne!(before[words], after, "{path} has no effect");
    }
}

/// Paths of all values in the schema, down to single words and free-form groups. Each object on the
/// way refuses other keys, and requires each of its own, so that `null` is not accepted.
fn known(schema: &Value) -> BTreeSet<String> {
    fn walk(root: &Value, node: &Value, path: &str, found: &mut BTreeSet<String>) {
        let name = node["$ref"].as_str().map(|name| name.rsplit('/').next());
        let node = name
            .flatten()
            .map_or(node, |name| &root["definitions"][name]);
        if node["type"] == "array" && node["items"]["properties"].is_object() {
            return walk(root, &node["items"], &format!("{path}[0]"), found);
        }
        let Some(properties) = node["properties"].as_object() else {
            found.insert(path.to_string());
            return;
        };
        // Other charts use the global values as well.
        let is_global = path == "global";
        assert!(is_global || node["additionalProperties"] == false, "{path}");
        let is_free = path.starts_with("pools") || path.ends_with("issuerRef");
        let required = node["required"].as_array().cloned().unwrap_or_default();
        for (key, inner) in properties {
            let is_required = required.iter().any(|one| one == key);
            assert!(is_free || is_required, "{path}.{key} may be null");
            let below = [path, key].join(if path.is_empty() { "" } else { "." });
            walk(root, inner, &below, found);
        }
    }
    let mut found = BTreeSet::new();
    walk(schema, schema, "", &mut found);
    found
}

/// Keys of values.yaml with the comments before them, including keys within braces. An indented key
/// belongs to the key above it.
fn written() -> BTreeSet<String> {
    let mut path: Vec<(usize, String)> = Vec::new();
    let mut found = BTreeSet::new();
    for line in read("values.yaml").lines() {
        let text = line.trim_start();
        let (text, of_list) = match text.strip_prefix("- ") {
            Some(rest) => (rest, 2),
            None => (text, 0),
        };
        let indent = line.len() - line.trim_start().len() + of_list;
        let Some((key, rest)) = text.split_once(':').filter(|_| !text.starts_with('#')) else {
            continue;
        };
        path.retain(|(other, _)| *other < indent);
        path.push((indent, key.to_string()));
        let names: Vec<_> = path.iter().map(|(_, key)| key.as_str()).collect();
        let name = names.join(".").replace("pools.", "pools[0].");
        let inner = rest.trim().strip_prefix('{').unwrap_or_default();
        for key in inner.split(", ").filter_map(|part| part.split_once(": ")) {
            found.insert(format!("{name}.{}", key.0));
        }
        found.insert(name);
    }
    found
}

#[test]
fn every_value_is_in_the_schema_and_is_tested() {
    let schema: Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    let known = known(&schema);
    assert!(known.len() > 70, "{known:?}");
    let tried: BTreeSet<_> = CHANGES.iter().map(|(path, ..)| path.to_string()).collect();
    assert_eq!(known, tried);
    let written = written();
    // Only users who have an issuer name it.
    let unwritten: Vec<_> = (known.difference(&written))
        .filter(|path| !path.starts_with("certificates.issuerRef."))
        .collect();
    assert!(unwritten.is_empty(), "not in values.yaml: {unwritten:?}");
}

#[test]
fn invalid_values_are_refused_by_name() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["storageclass.name=x"], &["storageclass", "not allowed"]),
        (&["driverName=a/b"], &["/driverName"]),
        (&["driverName=null"], &["missing property 'driverName'"]),
        (&["image=null"], &["missing property 'image'"]),
        (&["image.repository="], &["/image/repository"]),
        (&["image.digest=latest"], &["/image/digest"]),
        (&["csiDriver.attach=maybe"], &["/csiDriver/attach"]),
        (&["csiDriver.inlineMaxSize="], &["/csiDriver/inlineMaxSize"]),
        (&["node.copyRate=100Ki"], &["/node/copyRate"]),
        (&["node.importPaths={/}"], &["/node/importPaths/0"]),
        (&["node.importPaths={/a/../b}"], &["/node/importPaths/0"]),
        (
            &["node.importPaths={/var/lib}"],
            &["node.importPaths: /var/lib and /var/lib/"],
        ),
        (
            &["node.importPaths={/opt/a,/opt/a}"],
            &["node.importPaths: /opt/a and /opt/a/"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/disks/a,node.importPaths={/disks}"],
            &["node.importPaths: /disks and /disks/a/ (a pool)"],
        ),
        (
            &["kubeletDir=/opt/kubelet,node.importPaths={/opt/kubelet/pods}"],
            &["node.importPaths: /opt/kubelet/pods and /opt/kubelet/ (kubeletDir)"],
        ),
        (
            &["node.importPaths={/usr/share}"],
            &["node.importPaths: /usr/share and /usr/ (a directory of the image)"],
        ),
        (&["sidecars.pullPolicy=Often"], &["/sidecars/pullPolicy"]),
        (&["openshift.scc=perhaps"], &["/openshift/scc"]),
        (&["pools=null"], &["missing property 'pools'"]),
        (
            &["pools[0].name=a"],
            &["/pools/0", "missing property 'path'"],
        ),
        (&["pools[0].name=A,pools[0].path=/a"], &["/pools/0/name"]),
        (
            &["pools[0].name=a,pools[0].lvm=vg/pool,pools[0].path=/a"],
            &["/pools/0"],
        ),
        (&["pools[0].name=a,pools[0].lvm=vg"], &["/pools/0/lvm"]),
        (
            &[
                "pools[0].name=a,pools[0].lvm=vg/a",
                "pools[1].name=b,pools[1].lvm=vg/a",
            ],
            &["vg/a", "a directory of its own"],
        ),
        (
            &["pools[0].name=a,pools[0].path=relative"],
            &["/pools/0/path"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/a,pools[0].image=big"],
            &["/pools/0/image"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/a,pools[0].overcommit=0"],
            &["/pools/0/overcommit"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/a,pools[0].snapshots=some"],
            &["/pools/0/snapshots"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/a,pools[0].extent=4Ki"],
            &["/pools/0/extent"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/a,pools[0].trim=weekly"],
            &["/pools/0/trim"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/a/../b"],
            &["pools: /a/../b", "without .."],
        ),
        (
            &["pools[0].name=a,pools[0].path=//"],
            &["pools: //", "a directory of its own"],
        ),
        (
            &[
                "pools[0].name=a,pools[0].path=/a",
                "pools[1].name=a,pools[1].path=/b",
            ],
            &["pools: the name a is given twice"],
        ),
        (
            &[
                "pools[0].name=a,pools[0].path=/a",
                "pools[1].name=b,pools[1].path=/a/b/",
            ],
            &["pools: /a and /a/b/ are within each other"],
        ),
        (
            &["pools[0].name=a,pools[0].path=/var/lib/slackwater"],
            &["pools: /var/lib/slackwater contains the node's record"],
        ),
        (&["kubeletDir=/"], &["/kubeletDir"]),
        (&["logFormat=xml"], &["/logFormat", "'text', 'json'"]),
        (&["alpha={beta}"], &["/alpha/0"]),
        (
            &["certificates.mode=vault"],
            &["/certificates/mode", "'cert-manager'"],
        ),
        (
            &["certificates.mode=cert-manager"],
            &["certificates.nodes is empty"],
        ),
        (
            &["certificates.nodes={a}"],
            &["certificates.nodes must be empty", "mode made"],
        ),
        (
            &["certificates.issuerRef.name=a"],
            &["certificates.issuerRef must be empty", "mode made"],
        ),
        (
            &["certificates.issuerRef.kind=Issuer"],
            &["/certificates/issuerRef", "missing property 'name'"],
        ),
        (&["controller.replicas=0"], &["/controller/replicas"]),
        (&["node.gracePeriods=short"], &["/node/gracePeriods"]),
        (&["node.maxUnavailable=many"], &["/node/maxUnavailable"]),
        (&["node.agentPort=0"], &["/node/agentPort"]),
        (&["node.peerPort=-1"], &["/node/peerPort"]),
        (
            &["node.peerPort=9820"],
            &["node.peerPort: port 9820 is already used"],
        ),
        (
            &["node.agentPort=9808"],
            &["node.agentPort: the liveness probe already uses port 9808"],
        ),
        (
            &["metrics.port=9820"],
            &["metrics.port: node.agentPort already uses port 9820"],
        ),
        (&["metrics.address=localhost"], &["/metrics/address"]),
        (
            &["metrics.address=127.0.0.1"],
            &["metrics.address: 127.0.0.1 is not reachable"],
        ),
        (
            &["node.agentAddress=[::1]"],
            &["node.agentAddress: [::1] is not reachable"],
        ),
        (
            &["metrics.serviceMonitor.interval=often"],
            &["/metrics/serviceMonitor/interval"],
        ),
        (
            &["metrics.prometheusRule.runbookBase=runbooks"],
            &["/metrics/prometheusRule/runbookBase"],
        ),
        (
            &["metrics.dashboard.namespace=A"],
            &["/metrics/dashboard/namespace"],
        ),
        (
            &["metrics.sidecars.create=true,metrics.sidecars.port=9808"],
            &[
                "metrics.sidecars.port: the liveness probe already uses port 9808, which the provisioner would have",
            ],
        ),
        (
            &["metrics.sidecars.create=true,metrics.sidecars.port=9807"],
            &[
                "metrics.sidecars.port: metrics.port already uses port 9810, which the snapshotter would have",
            ],
        ),
        (
            &["metrics.sidecars.port=70000"],
            &["/metrics/sidecars/port"],
        ),
        (&["sidecars.verbosity=11"], &["/sidecars/verbosity"]),
        (&["snapshots=yes"], &["/snapshots"]),
        (
            &["snapshots=false,groupSnapshots=true"],
            &["groupSnapshots: true needs snapshots"],
        ),
        (
            &["snapshotMetadata.create=true"],
            &["snapshotMetadata.caCert", "--set-file"],
        ),
        (
            &[
                "snapshotMetadata.create=true,snapshotMetadata.caCert=BEGIN CERTIFICATE,snapshots=false",
            ],
            &["snapshotMetadata.create needs snapshots"],
        ),
        (
            &["storageClass.reclaimPolicy=Recycle"],
            &["/storageClass/reclaimPolicy"],
        ),
        (
            &["volumeSnapshotClass.name=A_B"],
            &["/volumeSnapshotClass/name"],
        ),
        (&["poolLostAfter=1w"], &["/poolLostAfter"]),
        (
            &["singleNode=true,poolLostAfter=1d"],
            &["poolLostAfter must be empty with singleNode"],
        ),
        (&["onNodeLost.readyFor=0s"], &["/onNodeLost/readyFor"]),
        (
            &["populators.create=true"],
            &["populators.image.digest is empty"],
        ),
        (
            &["schedules.create=true,admissionPolicy=false"],
            &["schedules.create needs admissionPolicy"],
        ),
        (
            &["populators.create=true,admissionPolicy=false"],
            &["populators.create needs admissionPolicy"],
        ),
        (
            &["populators.namespaces={shop}"],
            &["populators.namespaces must be empty"],
        ),
        (
            &["populators.image.digest=latest"],
            &["/populators/image/digest"],
        ),
        (
            &["populators.image.repository=a@b"],
            &["/populators/image/repository"],
        ),
        (&["populators.proxy=https://a:1"], &["/populators/proxy"]),
        (&["populators.caBundle=ca.crt"], &["/populators/caBundle"]),
        (
            &["populators.refused={kubernetes}"],
            &["/populators/refused/0"],
        ),
        (
            &["populators.scratchSize=big"],
            &["/populators/scratchSize"],
        ),
        (&["populators.replicas=0"], &["/populators/replicas"]),
        (&["populators.maxPods=0"], &["/populators/maxPods"]),
        (
            &["populators.maxPodsPerNamespace=0"],
            &["/populators/maxPodsPerNamespace"],
        ),
        (
            &["populators.cacheSnapshots=-1"],
            &["/populators/cacheSnapshots"],
        ),
        (
            &["populators.namespaces={a/b}"],
            &["/populators/namespaces/0"],
        ),
        (
            &["singleNode=true,onNodeLost.recreate=true"],
            &["onNodeLost.recreate must be false with singleNode"],
        ),
        (
            &["singleNode=true,schedules.create=true"],
            &["schedules.create must be false with singleNode"],
        ),
        (
            &["singleNode=true,page.create=true"],
            &["page.create must be false with singleNode"],
        ),
        (&["page.port=0"], &["/page/port"]),
        (
            &["page.create=true,page.port=9810"],
            &["page.port: metrics.port already uses port 9810"],
        ),
        (
            &["page.create=true,metrics.sidecars.create=true,page.port=9811"],
            &["page.port: metrics.sidecars.port already uses port 9811"],
        ),
        (
            &["singleNode=true,hooks.namespaces={a}"],
            &["hooks.namespaces must be empty with singleNode"],
        ),
    ];
    for (values, reported) in Sweep::requested().part_if_quick(cases.iter()) {
        let words: Vec<_> = values.iter().flat_map(|value| ["--set", value]).collect();
        let Some(output) = rendered(&words) else {
            return;
        };
        assert!(!output.status.success(), "{values:?} is accepted");
        let error = String::from_utf8_lossy(&output.stderr);
        for word in *reported {
            assert!(error.contains(word), "{values:?}: {error}");
        }
    }
}
