//! The connection to the API server, and reads of objects with the permissions of the user.

pub mod driver_version;
pub mod object;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::DateTime;
use k8s_openapi::jiff::tz::TimeZone;
use kube::api::{Api, DynamicObject, ListParams};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Error};

use crate::cli::Connection;
use crate::cluster::object::Kind;
use crate::failure::{Failure, Result};

/// How long an answer may take, and a watch may be silent before it is begun again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long nothing may arrive from a program in a pod, answers to pings included.
const STREAM_TIMEOUT: Duration = Duration::from_secs(120);
/// Objects in one page of a list, as kubectl has it.
const PAGE: u32 = 500;

/// Which namespaces a command is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    All,
    /// One.
    Namespace(String),
}

/// The parameters that select objects by their labels, if a selector is given.
pub fn labeled(selector: Option<&str>) -> ListParams {
    ListParams {
        label_selector: selector.map(str::to_string),
        ..ListParams::default()
    }
}

/// A connection to a cluster, with the permissions of its user.
pub struct Cluster {
    /// The connection.
    pub client: Client,
    /// The namespace of `-n` or of the context.
    pub namespace: String,
    /// The name of the driver.
    pub driver: String,
    /// What could not be shown, each once.
    notes: RefCell<BTreeSet<String>>,
    /// From which the connection was made.
    config: Option<Config>,
}

/// Whether there is a kubeconfig, readable or not.
fn has_kubeconfig() -> bool {
    let named = std::env::var_os("KUBECONFIG").is_some_and(|paths| !paths.is_empty());
    named || std::env::home_dir().is_some_and(|home| home.join(".kube/config").exists())
}

impl Cluster {
    /// Reads the kubeconfig. No request is sent.
    pub async fn connect(connection: &Connection) -> Result<Cluster> {
        let options = KubeConfigOptions {
            context: connection.context.clone(),
            ..KubeConfigOptions::default()
        };
        let failed = |error: &dyn std::fmt::Display| {
            Failure::failed(format!("reading the kubeconfig: {error}"))
        };
        let mut config = match &connection.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| failed(&error))?;
                let config = Config::from_custom_kubeconfig(file, &options).await;
                config.map_err(|error| failed(&error))?
            }
            // With a kubeconfig that cannot be read, the account of a pod would be of another cluster.
            None if connection.context.is_some() || has_kubeconfig() => {
                let config = Config::from_kubeconfig(&options).await;
                config.map_err(|error| failed(&error))?
            }
            None => Config::incluster().map_err(|error| failed(&error))?,
        };
        config.read_timeout = Some(ANSWER_TIMEOUT);
        if let Some(user) = &connection.as_user {
            config.auth_info.impersonate = Some(user.clone());
            config.auth_info.impersonate_groups = Some(connection.as_group.clone());
        }
        let namespace = connection.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config.clone())
            .map_err(|error| Failure::of("connecting to the cluster", &error))?;
        Ok(Cluster {
            client,
            namespace,
            driver: connection.driver_name.clone(),
            notes: RefCell::default(),
            config: Some(config),
        })
    }

    /// The same with another connection.
    pub fn with_client(client: Client, namespace: &str, driver: &str) -> Cluster {
        Cluster {
            client,
            namespace: namespace.into(),
            driver: driver.into(),
            notes: RefCell::default(),
            config: None,
        }
    }

    /// A connection for programs in pods, which may print nothing for longer than an answer may take.
    pub fn stream_client(&self) -> Result<Client> {
        let Some(config) = &self.config else {
            return Ok(self.client.clone());
        };
        let mut config = config.clone();
        config.read_timeout = Some(STREAM_TIMEOUT);
        let client = Client::try_from(config);
        client.map_err(|error| Failure::of("connecting to the cluster", &error))
    }

    /// The resource in one of its versions.
    pub fn api(&self, kind: &Kind, version: &str, scope: &Scope) -> Api<DynamicObject> {
        let resource = kind.resource(version);
        match scope {
            Scope::Namespace(namespace) if kind.is_namespaced => {
                Api::namespaced_with(self.client.clone(), namespace, &resource)
            }
            _ => Api::all_with(self.client.clone(), &resource),
        }
    }

    /// All objects of a kind. `None`, with a note, if the user may not list them. A kind that the
    /// cluster does not have, has no objects.
    pub async fn find(
        &self,
        kind: &Kind,
        scope: &Scope,
        params: &ListParams,
    ) -> Result<Option<Vec<DynamicObject>>> {
        match self.list(kind, scope, params).await {
            Ok(objects) => Ok(Some(objects)),
            Err(Error::Api(status)) if status.code == 403 => {
                let place = match scope {
                    Scope::Namespace(namespace) if kind.is_namespaced => {
                        format!(" in namespace {namespace}")
                    }
                    _ => String::new(),
                };
                self.note(format!(
                    "{} are not shown: you may not list them{place}",
                    kind.plural
                ));
                Ok(None)
            }
            Err(error) => Err(Failure::of(&format!("listing {}", kind.plural), &error)),
        }
    }

    /// The same, for the objects without which a command has nothing to show.
    pub async fn get_all(
        &self,
        kind: &Kind,
        scope: &Scope,
        params: &ListParams,
    ) -> Result<Vec<DynamicObject>> {
        let found = self.list(kind, scope, params).await;
        found.map_err(|error| Failure::of(&format!("listing {}", kind.plural), &error))
    }

    async fn list(
        &self,
        kind: &Kind,
        scope: &Scope,
        params: &ListParams,
    ) -> std::result::Result<Vec<DynamicObject>, Error> {
        for version in kind.versions {
            match self
                .list_pages(&self.api(kind, version, scope), params)
                .await
            {
                // The cluster does not have this version.
                Err(Error::Api(status)) if status.code == 404 => {}
                answer => return answer,
            }
        }
        Ok(Vec::new())
    }

    async fn list_pages(
        &self,
        api: &Api<DynamicObject>,
        params: &ListParams,
    ) -> std::result::Result<Vec<DynamicObject>, Error> {
        let mut params = params.clone().limit(PAGE);
        let mut all = Vec::new();
        loop {
            let page = api.list(&params).await?;
            all.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(all),
            }
        }
    }

    /// The newest version of a kind that the cluster has and the user may list.
    pub async fn served_version(&self, kind: &Kind, scope: &Scope) -> Option<&'static str> {
        for version in kind.versions {
            let params = ListParams::default().limit(1);
            if self.api(kind, version, scope).list(&params).await.is_ok() {
                return Some(version);
            }
        }
        None
    }

    /// One object.
    pub async fn get(&self, kind: &Kind, namespace: &str, name: &str) -> Result<DynamicObject> {
        let scope = Scope::Namespace(namespace.to_string());
        let api = self.api(kind, kind.versions[0], &scope);
        let got = api.get(name).await;
        got.map_err(|error| Failure::of(&format!("reading {} {name}", kind.kind), &error))
    }

    /// One object, in the newest version that the cluster has; `None` if it does not exist.
    pub async fn find_one(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
    ) -> Result<Option<DynamicObject>> {
        let scope = Scope::Namespace(namespace.to_string());
        // Without a name, the path would be that of all objects.
        let versions = match name.is_empty() {
            true => &[],
            false => kind.versions,
        };
        for version in versions {
            match self.api(kind, version, &scope).get_opt(name).await {
                Ok(Some(object)) => return Ok(Some(object)),
                Ok(None) => {}
                Err(error) => {
                    return Err(Failure::of(
                        &format!("reading {} {name}", kind.kind),
                        &error,
                    ));
                }
            }
        }
        Ok(None)
    }

    /// The time of the API server, by which controllers go. That of the user's machine may be wrong.
    pub async fn server_time(&self) -> Result<Timestamp> {
        let action = "asking the API server for its time";
        let request = http::Request::get("/version").body(Body::empty());
        let request = request.map_err(|error| Failure::failed(format!("{action}: {error}")))?;
        let answer = self.client.send(request).await;
        let answer = answer.map_err(|error| Failure::of(action, &error))?;
        let date = answer.headers().get(http::header::DATE);
        let date = date.and_then(|date| date.to_str().ok()).unwrap_or_default();
        let time = DateTime::strptime("%a, %d %b %Y %H:%M:%S GMT", date);
        let time = time.and_then(|time| TimeZone::UTC.to_timestamp(time));
        time.map_err(|_| Failure::failed(format!("{action}: its Date is {date:?}")))
    }

    /// Something that is not shown.
    pub fn note(&self, note: String) {
        self.notes.borrow_mut().insert(note);
    }

    /// All notes since the last call.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut *self.notes.borrow_mut())
            .into_iter()
            .collect()
    }
}
