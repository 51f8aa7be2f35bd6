//! Connections to agents over mutual TLS.

use std::sync::Arc;

use tonic::transport::{Channel, Endpoint};

use super::agents::{Dial, endpoint};
use crate::error::{Error, Result, chain};
use crate::tls::{Connector, Credentials, Name};

/// Connects to agents that prove their node's name, with the router's credentials.
#[derive(Clone, Debug)]
pub struct TlsDial(Arc<Credentials>);

impl TlsDial {
    /// Uses the credentials as they are when a connection is made.
    pub fn new(credentials: Arc<Credentials>) -> TlsDial {
        TlsDial(credentials)
    }

    /// A channel with these settings to the agent of a node, which connects when it is used.
    pub(crate) fn channel(
        &self,
        node: &str,
        address: &str,
        settings: &Endpoint,
    ) -> Result<Channel> {
        let to = address.parse().map_err(|_| {
            let problem = format!("{address:?} is not an address with a port");
            Error::invalid(format!("agent of node {node}"), problem)
        })?;
        let name = Name::node(node);
        let name = name.map_err(|error| Error::invalid("agent", chain(&error)))?;
        let connector = Connector::new(self.0.clone(), name, to);
        Ok(settings.connect_with_connector_lazy(connector))
    }
}

#[tonic::async_trait]
impl Dial for TlsDial {
    async fn dial(&self, node: &str, address: &str) -> Result<Channel> {
        self.channel(node, address, &endpoint(address)?)
    }
}
