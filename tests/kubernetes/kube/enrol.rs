//! Certificates of nodes on a real API server: which tokens prove a node's identity, and which are
//! refused.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use slackwater::error::{Error, Result, chain};
use slackwater::model::PoolId;
use slackwater::router::kube::certificates::Certificates;
use slackwater::router::kube::orphans::{DescribedVolume, Orphan, Stored};
use slackwater::router::kube::pools::requests::progress::PoolRequest;
use slackwater::router::kube::pools::status::Report;
use slackwater::router::kube::{AgentReports, InCluster, Options};
use slackwater::router::{Cluster, Enrolment};
use slackwater::tls::{Credentials, Name};

use crate::kube::plane::Plane;

const OBJECTS: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: slackwater}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: slackwater-node, namespace: slackwater}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: stranger, namespace: slackwater}}
---
{apiVersion: v1, kind: Node, metadata: {name: node-1}}
---
apiVersion: v1
kind: Pod
metadata: {name: agent-1, namespace: slackwater}
spec: {nodeName: node-1, serviceAccountName: slackwater-node, containers: [{name: driver, image: x}]}
---
apiVersion: v1
kind: Pod
metadata: {name: stranger-1, namespace: slackwater}
spec: {nodeName: node-1, serviceAccountName: stranger, containers: [{name: x, image: x}]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: enrol}
rules:
  - {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests], verbs: [create, get]}
  - {apiGroups: [''], resources: [configmaps], resourceNames: [slackwater-authority], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: enrol}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: enrol}
subjects:
  - {kind: ServiceAccount, name: slackwater-node, namespace: slackwater}
  - {kind: ServiceAccount, name: stranger, namespace: slackwater}
";

struct NoAgents;

#[tonic::async_trait]
impl AgentReports for NoAgents {
    fn place(&self, _agents: BTreeMap<String, SocketAddr>) {}

    fn reports(&self) -> Vec<Report> {
        Vec::new()
    }

    async fn stored(&self) -> Vec<Stored> {
        Vec::new()
    }

    async fn describe(&self, _node: &str, _ids: Vec<String>) -> Result<Vec<DescribedVolume>> {
        Ok(Vec::new())
    }

    async fn delete(&self, orphan: &Orphan) -> Result<()> {
        Err(Error::refused(
            &orphan.id,
            "no test deletes orphans of these agents",
        ))
    }

    async fn change_pool(&self, node: &str, _pool: PoolId, _request: PoolRequest) -> Result<()> {
        Err(Error::refused(
            node,
            "no test changes pools of these agents",
        ))
    }
}

/// A router in the cluster, once it has a certificate of its own.
fn router(plane: &Plane, identity: &str) -> (Arc<InCluster>, Arc<Certificates>, Arc<Credentials>) {
    let options = Options {
        poll_interval: Duration::from_millis(500),
        ..Options::new("csi.slackwater.dev", "slackwater", identity)
    };
    let client = plane.client();
    let inside = plane.runtime.enter();
    let cluster = InCluster::start(client, options, Arc::new(NoAgents));
    let certificates = Certificates::start(&cluster, "slackwater-node");
    drop(inside);
    let own = async { tokio::time::timeout(Duration::from_secs(120), certificates.own()).await };
    let own = plane
        .runtime
        .block_on(own)
        .expect("the router has its own certificate");
    (cluster, certificates, own)
}

#[test]
fn a_node_gets_its_certificate_with_the_token_of_its_pod() {
    let Some(plane) = Plane::start("certificates of nodes on a real API server") else {
        return;
    };
    plane.apply(include_str!("../../../deploy/chart/crds/pools.yaml"));
    plane.apply(OBJECTS);
    let (cluster, _certificates, own) = router(&plane, "router-a");
    assert!(own.expires().is_some() && cluster.is_leader());

    let token = |account: &str, pod: &str| {
        let words = ["create", "token", account, "-n", "slackwater"];
        let bound = [
            "--bound-object-kind=Pod",
            &format!("--bound-object-name={pod}"),
        ];
        plane
            .kubectl(&[&words[..], &bound[..]].concat())
            .trim()
            .to_string()
    };
    let folder = tempfile::Builder::new()
        .prefix("slackwater-enrol-")
        .tempdir()
        .unwrap();
    let enrol = |name: &str, node: &str, token: &str| -> (Enrolment, Result<(), Error>) {
        let into = folder.path().join(name);
        std::fs::create_dir(&into).unwrap();
        let enrolment = Enrolment {
            node: node.into(),
            namespace: "slackwater".into(),
            folder: into,
        };
        let done = plane
            .runtime
            .block_on(enrolment.refresh(&plane.client_of(token)));
        (enrolment, done)
    };
    let its = token("slackwater-node", "agent-1");
    let (enrolment, done) = enrol("own", "node-1", &its);
    done.unwrap();
    let named = |node: &str| Credentials::of_files(Name::node(node).unwrap(), enrolment.files());
    assert!(named("node-1").unwrap().is_trusted());
    assert!(named("node-2").is_err());
    let trusted = std::fs::read_to_string(enrolment.files().authorities).unwrap();
    assert_eq!(trusted.matches("BEGIN CERTIFICATE").count(), 1);
    let requests = || {
        plane
            .kubectl(&["get", "csr", "--no-headers"])
            .lines()
            .count()
    };
    assert_eq!(requests(), 1);
    plane
        .runtime
        .block_on(enrolment.refresh(&plane.client_of(&its)))
        .unwrap();
    assert_eq!(requests(), 1, "a valid certificate is not requested again");

    // The token of a pod on node-1 gets no other node's name, whatever the request contains.
    let (other, done) = enrol("others", "node-2", &its);
    let message = chain(&done.unwrap_err());
    assert!(
        message.contains("not valid for node.node-2.slackwater"),
        "{message}"
    );
    assert!(!other.files().key.exists(), "nothing is written");
    // Another account, although its pod exists.
    let (_, done) = enrol("stranger", "node-1", &token("stranger", "stranger-1"));
    let message = chain(&done.unwrap_err());
    assert!(
        message.contains("denied") && message.contains("stranger"),
        "{message}"
    );
    // A token that is not bound to a pod.
    let unbound = plane.kubectl(&["create", "token", "slackwater-node", "-n", "slackwater"]);
    let (_, done) = enrol("unbound", "node-3", unbound.trim());
    let message = chain(&done.unwrap_err());
    assert!(message.contains("does not name a node"), "{message}");
    eprintln!("{}", plane.kubectl(&["get", "csr"]));
    plane.runtime.block_on(cluster.shut_down());

    // Installed again, with the node's old folder: the authority of its certificate no longer
    // exists.
    let before = std::fs::read(enrolment.files().certificate).unwrap();
    for kind in ["secret", "configmap"] {
        plane.kubectl(&["delete", kind, "slackwater-authority", "-n", "slackwater"]);
    }
    let (cluster, _certificates, _) = router(&plane, "router-b");
    let client = plane.client_of(&its);
    plane.runtime.block_on(enrolment.refresh(&client)).unwrap();
    let after = std::fs::read(enrolment.files().certificate).unwrap();
    assert_ne!(before, after, "the node requests another one");
    assert!(named("node-1").unwrap().is_trusted());
    plane.runtime.block_on(cluster.shut_down());
}
