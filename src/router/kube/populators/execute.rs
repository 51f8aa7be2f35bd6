//! Does the steps of the population of a claim. Each names its object by uid or version.

mod cached;

use std::fmt::Debug;

use ::kube::api::{Api, DeleteParams, ListParams, PostParams, Preconditions};
use ::kube::{Error as KubeError, Resource};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Populators;
use super::cache::{NONE, SNAPSHOT, restored_from};
use super::decide::{Seen, Step};
use super::pod::{Attempt, pod, refusal};
use super::state::{
    CLAIM_LABEL, CREATING, DURABLE, NODE, POD, SELECTED_NODE, SOURCE, STATE, State, VALIDATOR,
    annotation, owner, prime_name, uid,
};
use super::turns;
use crate::error::{Error, Result, chain};
use crate::router::kube::reconcile::{Outcome, patch, written};
use crate::router::kube::{API_TIMEOUT, ask};

/// How often the record of a pod is tried while others write to the prime claim.
const MAX_RECORD_TRIES: usize = 8;

/// Does a step.
pub(super) async fn execute(populators: &Populators, seen: &Seen, step: Step) -> Result<Outcome> {
    let namespace = seen.claim.metadata.namespace.clone().unwrap_or_default();
    let executor = Executor {
        populators,
        seen,
        claims: Api::namespaced(populators.client.clone(), &namespace),
        pods: Api::namespaced(populators.client.clone(), &namespace),
        name: prime_name(&seen.claim),
    };
    match step {
        Step::CreatePrime {
            node,
            from,
            keeps_no_snapshot,
        } => {
            executor
                .create_prime(node.as_deref(), from.as_deref(), keeps_no_snapshot)
                .await
        }
        Step::SelectNode(node) => {
            let annotations = json!({SELECTED_NODE: node, NODE: node});
            executor.annotate_prime(&annotations).await
        }
        Step::DropNode => {
            executor
                .annotate(&seen.claim, &json!({SELECTED_NODE: null}))
                .await
        }
        Step::ForgetNode => executor.annotate_prime(&json!({NODE: null})).await,
        Step::Keep(point) => {
            let bytes = point.bytes.to_string();
            let annotations = json!({DURABLE: bytes, VALIDATOR: point.validator});
            executor.annotate_prime(&annotations).await
        }
        Step::CreatePod(attempt) => executor.create_pod(&attempt).await,
        Step::DeletePod(pod) => executor.delete_pod(&pod).await,
        Step::DeletePrime => executor.delete_prime().await,
        Step::Bind => executor.bind().await,
        Step::CreateSnapshot(_)
        | Step::RecordSnapshot(..)
        | Step::DeleteSnapshot(..)
        | Step::GiveUpSnapshot(..)
        | Step::MakeRoom { .. } => executor.cache(step).await,
        Step::Note(state) => executor.note(&state).await,
    }
}

struct Executor<'a> {
    populators: &'a Populators,
    seen: &'a Seen,
    claims: Api<PersistentVolumeClaim>,
    pods: Api<Pod>,
    /// Of prime claim and pod.
    name: String,
}

/// An object that a step is about was not there when it was decided.
fn absent(what: &str) -> Error {
    Error::invalid(what, "is absent")
}

impl Executor<'_> {
    fn prime(&self) -> Result<&PersistentVolumeClaim> {
        let prime = self.seen.prime.as_ref();
        prime.ok_or_else(|| absent("the prime claim"))
    }

    /// Writes annotations of a claim, over the version that was read.
    async fn annotate(
        &self,
        claim: &PersistentVolumeClaim,
        annotations: &Value,
    ) -> Result<Outcome> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let fields = json!({"annotations": annotations});
        over(&self.claims, "claim", name, claim, fields, json!({})).await
    }

    async fn annotate_prime(&self, annotations: &Value) -> Result<Outcome> {
        self.annotate(self.prime()?, annotations).await
    }

    async fn note(&self, state: &State) -> Result<Outcome> {
        let text = serde_json::to_string(state);
        let text = text.map_err(|error| Error::invalid(STATE, error.to_string()))?;
        let before = State::of(&self.seen.claim);
        let outcome = self
            .annotate(&self.seen.claim, &json!({STATE: text}))
            .await?;
        if outcome == Outcome::Done && state.failures > before.failures {
            let counts = self.populators.metrics.populations();
            counts.failed(state.is_final);
        }
        Ok(outcome)
    }

    /// A claim like the one that is to be filled, without its source, or with a cached snapshot.
    async fn create_prime(
        &self,
        node: Option<&str>,
        from: Option<&str>,
        keeps_no_snapshot: bool,
    ) -> Result<Outcome> {
        match from {
            Some(_) => self.set_used(),
            None if (keeps_no_snapshot || self.begins()) && self.takes_turn() => {}
            None => return Ok(Outcome::Stale),
        }
        let claim = &self.seen.claim;
        let spec = claim.spec.clone().unwrap_or_default();
        let source = self.seen.source.as_ref();
        let (_, source) = source.map_err(|_| absent("the source"))?;
        let mut annotations = json!({SOURCE: source.version()});
        if keeps_no_snapshot {
            annotations[SNAPSHOT] = json!(NONE);
        }
        if let Some(node) = node {
            annotations[SELECTED_NODE] = json!(node);
            annotations[NODE] = json!(node);
        }
        let requests = spec.resources.and_then(|resources| resources.requests);
        let prime = json!({
            "metadata": {
                "name": self.name,
                "labels": {CLAIM_LABEL: uid(claim)},
                "annotations": annotations,
                "ownerReferences": [owner(claim)],
            },
            "spec": {
                "accessModes": spec.access_modes,
                "storageClassName": spec.storage_class_name,
                "volumeMode": spec.volume_mode,
                "volumeAttributesClassName": spec.volume_attributes_class_name,
                "resources": {"requests": requests},
                "dataSource": from.map(cached::reference),
            },
        });
        let prime = parsed(prime)?;
        let params = PostParams::default();
        let created = self.claims.create(&params, &prime);
        let written = written(&format!("claim {}", self.name), created).await;
        if written.is_err() {
            let mut memory = self.populators.memory();
            memory.turns.give_back(uid(claim));
        }
        written
    }

    /// Whether a pod may still be started for the claim.
    fn takes_turn(&self) -> bool {
        turns::take(self.populators, &self.seen.claim, self.seen.prime.as_ref())
    }

    /// Creates a pod and records it. The prime claim is marked before, so that a pod that was created
    /// and is gone before it is recorded is not forgotten.
    async fn create_pod(&self, attempt: &Attempt) -> Result<Outcome> {
        let mut settings = self.populators.options.settings.clone();
        settings.refused.extend(self.api_servers().await?);
        let new = pod(&self.seen.claim, attempt, &settings);
        let new = new.map_err(|error| Error::invalid("pod", error.to_string()))?;
        let prime = self.prime()?;
        if !self.takes_turn() || self.record(prime, Some(CREATING)).await? == Outcome::Stale {
            return Ok(Outcome::Stale);
        }
        let params = PostParams::default();
        let created = tokio::time::timeout(API_TIMEOUT, self.pods.create(&params, &new)).await;
        match created {
            Ok(Ok(created)) => self.replace_mark(Some(uid(&created))).await,
            // It was certainly not created.
            Ok(Err(KubeError::Api(status))) if (400..500).contains(&status.code) => {
                self.replace_mark(annotation(prime, POD)).await?;
                let what = format!("pod {}", self.name);
                Err(Error::refused(what, refusal(&status.message, &new)))
            }
            Ok(Err(error)) => Err(Error::unreachable("the API server", chain(&error))),
            Err(_) => Err(Error::unreachable(
                "the API server",
                "it did not answer in time",
            )),
        }
    }

    /// Records the pod instead of the mark. The binder of claims also writes to a prime claim that was
    /// just bound, so this is tried again with another version that has the mark.
    async fn replace_mark(&self, pod: Option<&str>) -> Result<Outcome> {
        let uid_of_prime = uid(self.prime()?);
        for _ in 0..MAX_RECORD_TRIES {
            let what = format!("claim {}", self.name);
            let now = ask(&what, self.claims.get_opt(&self.name)).await?;
            let is_marked = |prime: &PersistentVolumeClaim| {
                uid(prime) == uid_of_prime && annotation(prime, POD) == Some(CREATING)
            };
            let Some(now) = now.filter(is_marked) else {
                break;
            };
            if self.record(&now, pod).await? == Outcome::Done {
                return Ok(Outcome::Done);
            }
        }
        Ok(Outcome::Stale)
    }

    async fn record(&self, prime: &PersistentVolumeClaim, pod: Option<&str>) -> Result<Outcome> {
        self.annotate(prime, &json!({POD: pod})).await
    }

    /// Addresses of the API server, to which no source may lead.
    async fn api_servers(&self) -> Result<Vec<String>> {
        let client = self.populators.client.clone();
        let api = Api::<EndpointSlice>::namespaced(client, "default");
        let its = ListParams::default().labels("kubernetes.io/service-name=kubernetes");
        let slices = ask("the addresses of the API server", api.list(&its)).await?;
        let own = std::env::var("KUBERNETES_SERVICE_HOST").ok();
        let own = own.filter(|host| host.parse::<std::net::IpAddr>().is_ok());
        let endpoints = slices.items.into_iter().flat_map(|slice| slice.endpoints);
        let addresses = endpoints.flat_map(|endpoint| endpoint.addresses);
        Ok(addresses.chain(own).collect())
    }

    async fn delete_pod(&self, uid: &str) -> Result<Outcome> {
        let params = only(uid, None);
        let deleted = self.pods.delete(&self.name, &params);
        written(&format!("pod {}", self.name), deleted).await
    }

    async fn delete_prime(&self) -> Result<Outcome> {
        let prime = self.prime()?;
        let version = prime.metadata.resource_version.clone();
        let params = only(uid(prime), version);
        let deleted = self.claims.delete(&self.name, &params);
        written(&format!("claim {}", self.name), deleted).await
    }

    async fn bind(&self) -> Result<Outcome> {
        let volume = self.seen.volume.as_ref();
        let volume = volume.ok_or_else(|| absent("the PersistentVolume"))?;
        let meta = &self.seen.claim.metadata;
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let api = Api::<PersistentVolume>::all(self.populators.client.clone());
        let spec = json!({"claimRef": {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "namespace": meta.namespace, "name": meta.name, "uid": meta.uid,
            "resourceVersion": meta.resource_version,
        }});
        let fields = json!({});
        let outcome = over(&api, "PersistentVolume", name, volume, fields, spec).await?;
        if let (Outcome::Done, Some(_)) = (outcome, restored_from(self.prime()?)) {
            self.populators.metrics.populations().cache_hit();
            self.set_used();
        }
        Ok(outcome)
    }
}

/// Patches metadata and spec of an object, in exactly the version that was read.
async fn over<K>(
    api: &Api<K>,
    kind: &str,
    name: &str,
    read: &K,
    mut metadata: Value,
    spec: Value,
) -> Result<Outcome>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    metadata["resourceVersion"] = json!(read.meta().resource_version);
    let mut fields = json!({"metadata": metadata});
    if spec != json!({}) {
        fields["spec"] = spec;
    }
    patch(api, &format!("{kind} {name}"), name, fields).await
}

fn only(uid: &str, resource_version: Option<String>) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.into()),
            resource_version,
        }),
        ..DeleteParams::default()
    }
}

fn parsed<K: DeserializeOwned>(object: Value) -> Result<K> {
    serde_json::from_value(object).map_err(|error| Error::invalid("object", error.to_string()))
}
