//! The decision for whom a certificate is signed: the node of the pod that requests it, as the API
//! server states it.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use serde_json::{Value, json};

use super::authorities::{Authorities, leaf};
use crate::error::chain;
use crate::tls::{Name, TlsError};

/// The signer name of the requests that the router answers.
pub const SIGNER: &str = "slackwater.dev/agent";
/// The key under which the API server states the node of the pod that a token was created for.
const NODE: &str = "authentication.kubernetes.io/node-name";

/// The part of a CertificateSigningRequest that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// It was not denied, and it has no certificate yet.
    pub is_open: bool,
    user: String,
    /// The node of the user's pod; `None` if the token is not of a pod.
    node: Option<String>,
    pem: Vec<u8>,
}

impl Request {
    /// Reads an object; `None` if it has another signer name.
    pub fn read(request: CertificateSigningRequest) -> Option<Request> {
        let spec = request.spec;
        if spec.signer_name != SIGNER {
            return None;
        }
        let status = request.status.unwrap_or_default();
        let mut conditions = status.conditions.iter().flatten();
        let is_over = conditions.any(|one| one.type_ == "Denied" || one.type_ == "Failed");
        let node = spec.extra.and_then(|mut extra| extra.remove(NODE));
        let node = node.and_then(|nodes| <[String; 1]>::try_from(nodes).ok());
        Some(Request {
            is_open: !is_over && status.certificate.is_none_or(|bytes| bytes.0.is_empty()),
            user: spec.username.unwrap_or_default(),
            node: node.map(|[node]| node),
            pem: spec.request.0,
        })
    }
}

/// The answer to a request.
#[derive(Debug)]
pub enum Judgement {
    /// A certificate for this node.
    Sign {
        node: String,
        /// As PEM.
        certificate: String,
    },
    /// No certificate, for this reason.
    Deny(String),
}

impl Judgement {
    /// The patch with the condition of the API.
    pub(super) fn condition(&self) -> Value {
        let (kind, reason, message) = match self {
            Judgement::Sign { node, .. } => (
                "Approved",
                "NodesOwnPod",
                format!("requested by the pod of node {node}"),
            ),
            Judgement::Deny(problem) => ("Denied", "NotANodesPod", problem.clone()),
        };
        json!({ "status": { "conditions": [{
            "type": kind, "status": "True", "reason": reason, "message": message,
        }]}})
    }
}

/// Decides about a request. Nothing that it contains is used, apart from its key.
pub fn judge(authorities: &Authorities, request: &Request, account: &str) -> Judgement {
    if request.user != account {
        return Judgement::Deny(format!(
            "requested by {}; only {account} may request certificates of agents",
            request.user
        ));
    }
    let Some(node) = &request.node else {
        return Judgement::Deny(
            "the token does not name a node; it must be a pod token issued by Kubernetes 1.30 or later".into(),
        );
    };
    let sign = || -> Result<String, TlsError> {
        authorities
            .signs()?
            .sign(&request.pem, &Name::node(node)?, leaf())
    };
    match sign() {
        Ok(certificate) => Judgement::Sign {
            node: node.clone(),
            certificate,
        },
        Err(error) => Judgement::Deny(chain(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::{Bundle, Credentials, request};
    use k8s_openapi::jiff::Timestamp;

    const ACCOUNT: &str = "system:serviceaccount:slackwater:slackwater-node";

    fn object(user: &str, nodes: Value, pem: &str) -> CertificateSigningRequest {
        use k8s_openapi::ByteString;
        let pem = serde_json::to_value(ByteString(pem.as_bytes().to_vec())).unwrap();
        let object = json!({"metadata": {"name": "x"}, "spec": {
            "signerName": SIGNER, "username": user, "request": pem,
            "extra": {"authentication.kubernetes.io/node-name": nodes}}});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_node_gets_its_own_name_and_no_other() {
        let authorities = Authorities::step(None, Timestamp::now()).unwrap().unwrap();
        // The name that it requests does not matter.
        let (key, pem) = request::make(&Name::controller().unwrap()).unwrap();
        let asked = Request::read(object(ACCOUNT, json!(["node-1"]), &pem)).unwrap();
        assert!(asked.is_open);
        let Judgement::Sign { node, certificate } = judge(&authorities, &asked, ACCOUNT) else {
            panic!("it's denied")
        };
        assert_eq!(node, "node-1");
        let bundle = Bundle {
            certificate: certificate.into_bytes(),
            key: key.into_bytes(),
            authorities: authorities.bundle().into_bytes(),
        };
        let own = Credentials::of_bundle(Name::node("node-1").unwrap(), bundle.clone()).unwrap();
        assert!(own.expires().is_some());
        for other in [Name::controller().unwrap(), Name::node("node-2").unwrap()] {
            assert!(Credentials::of_bundle(other, bundle.clone()).is_err());
        }
    }

    #[test]
    fn requests_that_are_not_of_a_nodes_pod_are_denied() {
        let authorities = Authorities::step(None, Timestamp::now()).unwrap().unwrap();
        let (_, pem) = request::make(&Name::controller().unwrap()).unwrap();
        let cases = [
            (
                "system:serviceaccount:shop:slackwater-node",
                json!(["node-1"]),
                &*pem,
                "requested by",
            ),
            (ACCOUNT, json!([]), &pem, "does not name a node"),
            (
                ACCOUNT,
                json!(["node-1", "node-2"]),
                &pem,
                "does not name a node",
            ),
            (ACCOUNT, json!(["node 1"]), &pem, "cannot be used as a name"),
            (ACCOUNT, json!(["node-1"]), "no request", "not PEM"),
        ];
        for (user, nodes, pem, words) in cases {
            let asked = Request::read(object(user, nodes, pem)).unwrap();
            let judgement = judge(&authorities, &asked, ACCOUNT);
            let Judgement::Deny(problem) = &judgement else {
                panic!("{judgement:?}")
            };
            assert!(problem.contains(words), "{problem}");
            assert_eq!(
                judgement.condition()["status"]["conditions"][0]["type"],
                "Denied"
            );
        }
    }

    #[test]
    fn what_is_answered_is_not_answered_again() {
        let (_, pem) = request::make(&Name::controller().unwrap()).unwrap();
        let mut over = object(ACCOUNT, json!(["node-1"]), &pem);
        over.status = serde_json::from_value(json!({"certificate": "eA=="})).unwrap();
        assert!(!Request::read(over.clone()).unwrap().is_open);
        let denied = json!({"conditions": [{"type": "Denied", "status": "True"}]});
        over.status = serde_json::from_value(denied).unwrap();
        assert!(!Request::read(over.clone()).unwrap().is_open);
        over.spec.signer_name = "example.org/other".into();
        assert_eq!(Request::read(over), None);
    }
}
