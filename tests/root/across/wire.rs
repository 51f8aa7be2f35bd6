//! The connection between two agents, which counts, ends early, or is slow.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A connection to the source that counts what it sends, and may end early or be held up.
#[derive(Clone)]
pub struct Wire {
    pub address: SocketAddr,
    pub sent: Arc<AtomicU64>,
    /// It ends after this many bytes.
    pub limit: Arc<AtomicU64>,
    /// It sends no more than this many bytes.
    held_at: Arc<AtomicU64>,
}

impl Wire {
    pub async fn to(source: SocketAddr) -> Wire {
        Wire::at((Ipv4Addr::LOCALHOST, 0).into(), source).await
    }

    /// A connection by way of an address of this machine.
    pub async fn at(address: SocketAddr, source: SocketAddr) -> Wire {
        let listener = TcpListener::bind(address).await.unwrap();
        let wire = Wire {
            address: listener.local_addr().unwrap(),
            sent: Arc::default(),
            limit: Arc::new(AtomicU64::new(u64::MAX)),
            held_at: Arc::new(AtomicU64::new(u64::MAX)),
        };
        let accepting = wire.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                if let Ok(far) = TcpStream::connect(source).await {
                    tokio::spawn(accepting.clone().pass(near, far));
                }
            }
        });
        wire
    }

    /// Sends this many bytes in a second, until the result is dropped.
    pub fn slow_down(&self, rate: u64) -> SlowWire {
        self.held_at
            .store(self.sent.load(Ordering::SeqCst), Ordering::SeqCst);
        let held_at = self.held_at.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                held_at.fetch_add(rate / 10, Ordering::SeqCst);
            }
        });
        SlowWire {
            held_at: self.held_at.clone(),
            task,
        }
    }

    async fn pass(self, near: TcpStream, far: TcpStream) {
        let (mut near_in, mut near_out) = near.into_split();
        let (mut far_in, mut far_out) = far.into_split();
        let asked = tokio::spawn(async move { tokio::io::copy(&mut near_in, &mut far_out).await });
        let mut bytes = vec![0; 64 << 10];
        while let Ok(read @ 1..) = far_in.read(&mut bytes).await {
            let sent = self.sent.fetch_add(read as u64, Ordering::SeqCst) + read as u64;
            while sent > self.held_at.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            if sent > self.limit.load(Ordering::SeqCst)
                || near_out.write_all(&bytes[..read]).await.is_err()
            {
                break;
            }
        }
        asked.abort();
    }
}

/// A connection that is slow until this is dropped.
pub struct SlowWire {
    held_at: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Drop for SlowWire {
    fn drop(&mut self) {
        self.task.abort();
        // The task may be about to add to it.
        self.held_at.store(u64::MAX / 2, Ordering::SeqCst);
    }
}
