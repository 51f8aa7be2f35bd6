//! Certificates of router and agents, if no other program creates them.
//!
//! The authority is a Secret that only routers may read. Its public part, with those of its successor
//! and its predecessor, is a ConfigMap that agents read. A router creates its own certificate. A node's
//! pod requests its certificate by a CertificateSigningRequest with the token of its service account,
//! which the API server has bound to the pod's node; the leading router signs it for that node and no
//! other. So a node's key never leaves the node, and a compromised node cannot get the name of another.
//!
//! | file | content |
//! |---|---|
//! | `authorities` | the authority, its successor and its predecessor, and when they change |
//! | `signer` | the decision for whom a request is signed |
//! | `enrol` | the program in the node's pod |

pub mod authorities;
pub mod enrol;
pub mod signer;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use ::kube::runtime::watcher;
use ::kube::{Client, Error as KubeError};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;

use super::reconcile::watches::Store;
use super::reconcile::{Controller, Next, Outcome, Reconciler};
use super::{InCluster, ask};
use crate::error::{Result, chain};
use crate::router::cluster::Cluster;
use crate::tls::{Bundle, Credentials, Name, TlsError};
use authorities::{Authorities, LEAF_VALIDITY, leaf};
use signer::{Judgement, Request, SIGNER};

/// The name of the Secret and of the ConfigMap.
pub const TRUST: &str = "slackwater-authority";
/// The list of trusted authorities in the ConfigMap.
pub const CA: &str = "ca.crt";
/// How often routers check whether the authority has changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// The delay while there is no authority, or the API server does not answer.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// The name of the requests among the watches.
const REQUESTS: &str = "CertificateSigningRequests";

/// The certificates in a router: it maintains the authority, creates its own certificate, and signs
/// those of nodes while it leads.
pub struct Certificates {
    client: Client,
    namespace: String,
    /// The service account of the nodes' pods.
    account: String,
    requests: Mutex<Store<Request>>,
    authorities: Mutex<Option<Authorities>>,
    /// The router's own certificate, once there is an authority.
    own: watch::Sender<Option<Arc<Credentials>>>,
}

impl Certificates {
    /// Starts the tasks of a router. `account` is the name of the service account of the nodes' pods, in
    /// the router's own namespace.
    pub fn start(cluster: &Arc<InCluster>, account: &str) -> Arc<Certificates> {
        let this = Arc::new(Certificates {
            client: cluster.client.clone(),
            namespace: cluster.options.namespace.clone(),
            account: account.into(),
            requests: Mutex::default(),
            authorities: Mutex::default(),
            own: watch::channel(None).0,
        });
        let its = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
        let api = Api::<CertificateSigningRequest>::all(this.client.clone());
        let taking = Arc::clone(&this);
        cluster.watch(api, its, REQUESTS, move |event| {
            let mut requests = taking
                .requests
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            requests.take(event, Request::read, PartialEq::eq);
        });
        let (keeping, of) = (Arc::clone(&this), Arc::clone(cluster));
        cluster.spawn(async move { keeping.keep(&of).await });
        let every = cluster.options.poll_interval;
        cluster.control(Arc::clone(&this), every, None);
        this
    }

    /// The router's own certificate, which is renewed automatically. Waits until there is an authority.
    pub async fn own(&self) -> Arc<Credentials> {
        let mut own = self.own.subscribe();
        loop {
            if let Some(own) = own.borrow_and_update().as_ref() {
                return Arc::clone(own);
            }
            // The sender lives as long as `self`.
            let _ = own.changed().await;
        }
    }

    async fn keep(&self, cluster: &InCluster) {
        loop {
            let pause = match self.refresh(cluster.is_leader()).await {
                Ok(true) => CHECK_INTERVAL,
                Ok(false) => RETRY_DELAY,
                Err(error) => {
                    tracing::warn!(error, "failed to maintain the certificate authority");
                    RETRY_DELAY
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Maintains authority, ConfigMap and own certificate; whether there is an authority.
    async fn refresh(&self, leads: bool) -> Result<bool, String> {
        let secrets = Api::<Secret>::namespaced(self.client.clone(), &self.namespace);
        let found = ask("the Secret", secrets.get_opt(TRUST)).await;
        let found = found.map_err(|error| chain(&error))?;
        let data = found
            .as_ref()
            .and_then(|secret| secret.data.clone())
            .unwrap_or_default();
        let mut now = Authorities::read(&text(data))?;
        if leads {
            let next = Authorities::step(now.as_ref(), Timestamp::now());
            if let Some(next) = next.map_err(|error| chain(&error))? {
                self.write(&secrets, found, &next).await?;
                tracing::info!("changed the certificate authority");
                now = Some(next);
            }
        }
        let Some(now) = now else {
            return Ok(false);
        };
        if leads {
            self.publish(&now.bundle()).await?;
        }
        self.renew(&now).map_err(|error| chain(&error))?;
        *self
            .authorities
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(now);
        Ok(true)
    }

    /// Only over the version that was read, so the authority of another router is never overwritten.
    async fn write(
        &self,
        secrets: &Api<Secret>,
        found: Option<Secret>,
        next: &Authorities,
    ) -> Result<(), String> {
        let is_new = found.is_none();
        let mut secret = found.unwrap_or_else(|| Secret {
            metadata: ObjectMeta {
                name: Some(TRUST.into()),
                ..ObjectMeta::default()
            },
            ..Secret::default()
        });
        let data = next.data().into_iter();
        secret.data = Some(
            data.map(|(key, text)| (key, ByteString(text.into_bytes())))
                .collect(),
        );
        let params = PostParams::default();
        let written = async {
            match is_new {
                true => secrets.create(&params, &secret).await,
                false => secrets.replace(TRUST, &params, &secret).await,
            }
        };
        ask("the Secret", written)
            .await
            .map(drop)
            .map_err(|error| chain(&error))
    }

    async fn publish(&self, bundle: &str) -> Result<(), String> {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let write = async {
            let data = BTreeMap::from([(CA.to_string(), bundle.to_string())]);
            match api.get_opt(TRUST).await? {
                Some(map) if map.data.as_ref() == Some(&data) => Ok(()),
                Some(_) => {
                    let patch = Patch::Merge(serde_json::json!({ "data": data }));
                    api.patch(TRUST, &PatchParams::default(), &patch)
                        .await
                        .map(drop)
                }
                None => {
                    let map = ConfigMap {
                        metadata: ObjectMeta {
                            name: Some(TRUST.into()),
                            ..ObjectMeta::default()
                        },
                        data: Some(data),
                        ..ConfigMap::default()
                    };
                    api.create(&PostParams::default(), &map).await.map(drop)
                }
            }
        };
        ask("the ConfigMap", write)
            .await
            .map_err(|error| chain(&error))
    }

    /// Creates a new certificate of the router if half of the lifetime of the last one has passed, or if
    /// the authority has changed.
    fn renew(&self, now: &Authorities) -> Result<(), TlsError> {
        let before = self
            .authorities
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let own = self.own.borrow().clone();
        let left = own.as_ref().and_then(|own| own.time_left());
        if own.is_some()
            && before.as_ref() == Some(now)
            && left.is_some_and(|left| left > LEAF_VALIDITY / 2)
        {
            return Ok(());
        }
        let name = Name::controller()?;
        let bundle = Bundle {
            authorities: now.bundle().into_bytes(),
            ..now.signs()?.issue(&name, leaf())?
        };
        match own {
            Some(own) => own.replace(bundle),
            None => {
                let own = Arc::new(Credentials::of_bundle(name, bundle)?);
                self.own.send_replace(Some(own));
                Ok(())
            }
        }
    }
}

/// A request that is not answered yet.
pub(super) struct OpenRequest {
    name: String,
    request: Request,
    authorities: Authorities,
    /// The full name of the only service account that may request.
    account: String,
}

impl fmt::Display for OpenRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CertificateSigningRequest {}", self.name)
    }
}

#[tonic::async_trait]
impl Controller for Certificates {
    const NAME: &'static str = "certificates";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<OpenRequest>> {
        let authorities = self
            .authorities
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()?;
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let open = requests.now().iter().filter(|(_, request)| request.is_open);
        let open = open.map(|(name, request)| OpenRequest {
            name: name.clone(),
            request: request.clone(),
            authorities: authorities.clone(),
            account: format!("system:serviceaccount:{}:{}", self.namespace, self.account),
        });
        Some(open.collect())
    }
}

#[tonic::async_trait]
impl Reconciler for Certificates {
    type Object = OpenRequest;
    type Step = Judgement;

    fn next(open: &OpenRequest) -> Next<Judgement> {
        Next::Step(signer::judge(
            &open.authorities,
            &open.request,
            &open.account,
        ))
    }

    async fn execute(&self, open: &OpenRequest, judgement: Judgement) -> Result<Outcome> {
        let (what, name) = (open.to_string(), open.name.as_str());
        let api = Api::<CertificateSigningRequest>::all(self.client.clone());
        let params = PatchParams::default();
        let condition = Patch::Merge(judgement.condition());
        let approve = gone(api.patch_approval(name, &params, &condition));
        ask(&what, approve).await?;
        match judgement {
            Judgement::Sign { node, certificate } => {
                let bytes = ByteString(certificate.into_bytes());
                let patch = serde_json::json!({ "status": { "certificate": bytes } });
                let patch = Patch::Merge(patch);
                ask(&what, gone(api.patch_status(name, &params, &patch))).await?;
                tracing::info!(node, request = name, "signed the certificate of a node");
            }
            Judgement::Deny(problem) => {
                tracing::warn!(request = name, problem, "denied a certificate");
            }
        }
        Ok(Outcome::Done)
    }
}

/// A request that does not exist any more needs no answer.
async fn gone<T>(answer: impl Future<Output = Result<T, KubeError>>) -> Result<(), KubeError> {
    match answer.await {
        Ok(_) => Ok(()),
        Err(KubeError::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

fn text(data: BTreeMap<String, ByteString>) -> BTreeMap<String, String> {
    let each = data.into_iter();
    each.filter_map(|(key, bytes)| Some((key, String::from_utf8(bytes.0).ok()?)))
        .collect()
}
