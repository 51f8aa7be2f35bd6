//! The router of `slackwater serve --role controller`.

use std::sync::Arc;

use super::Failure;
use super::serve::credentials;
use crate::config::{self, BadConfig, ControllerConfig};
use crate::router::{Agents, NoCluster, Options, Router, TlsDial};
use crate::server;
use crate::tls::Name;

/// A router that asks its agents from now on.
pub(super) async fn start(
    driver_name: String,
    controller: ControllerConfig,
    options: &server::Options,
) -> Result<Router, Failure> {
    let ControllerConfig { agents, tls } = controller;
    let name = Name::controller().map_err(Failure::run)?;
    let Some(files) = tls else {
        return Err(BadConfig("--tls-cert is missing".into()).into());
    };
    let dial = Arc::new(TlsDial::new(credentials(name, files)?));
    let known = Arc::new(Agents::new(dial, &driver_name));
    match agents {
        config::Agents::At(given) => {
            let each = given.into_iter();
            known.set(each.map(|agent| (agent.node, agent.address.to_string())));
        }
        config::Agents::Of(_) => {}
    }
    let of_router = Options {
        driver_name,
        alpha: options.alpha,
        metrics: options.metrics.clone(),
    };
    Ok(Router::new(known, Arc::new(NoCluster), of_router))
}
