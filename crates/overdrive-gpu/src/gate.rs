use overdrive_core::Error as Common;
use tch::{Kind, TchError, Tensor};

use crate::Result;
use crate::kernels::Argument::{Element, I32, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, check_shapes, dense, dtype, multiples_of_16};

/// A non-linearity, applied element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x·σ(x)`, also called swish.
    Silu,
    /// `x·Φ(x)`, the exact form with erf.
    Gelu,
    /// `x/2·(1 + tanh(√(2/π)·(x + 0.044715 x³)))`: GPT-2's `gelu_new`, PyTorch's `approximate="tanh"`.
    GeluTanh,
    /// `max(x, 0)`
    Relu,
}

impl Activation {
    /// Applies the activation by libtorch's operator.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn apply(self, x: &Tensor) -> std::result::Result<Tensor, TchError> {
        match self {
            Self::Silu => x.f_silu(),
            Self::Gelu => x.f_gelu("none"),
            Self::GeluTanh => x.f_gelu("tanh"),
            Self::Relu => x.f_relu(),
        }
    }
}

/// `activation(gate) · up` for rows of one width and dtype, forward and backward.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    kernels: &'static Kernels,
    width: i64,
    forward: Loaded,
    backward: Loaded,
}

impl Kernels {
    /// Returns the kernels for rows of `width` gates; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn gate(
        &'static self,
        kind: Kind,
        width: i64,
        activation: Activation,
    ) -> Result<Option<Gate>> {
        let Some(dtype) = dtype(kind) else {
            return Ok(None);
        };
        // The numbers are those of gate.py.
        let activation = match activation {
            Activation::Silu => 0,
            Activation::Gelu => 1,
            Activation::GeluTanh => 2,
            Activation::Relu => 3,
        };
        let find = |kernel| {
            self.find(&Request {
                kernel,
                dtype,
                constants: vec![("ACTIVATION", activation)],
                least: ("BLOCK", 1),
                aligned: multiples_of_16(&[width]),
            })
        };
        let (forward, backward) = (find("glu_forward")?, find("glu_backward")?);
        Ok(forward.zip(backward).map(|(forward, backward)| Gate {
            kernels: self,
            width,
            forward,
            backward,
        }))
    }
}

impl Gate {
    /// Computes rows of `gate_up (…, 2·width)`, the gates first.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors on another device or of another dtype,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn joint(&self, gate_up: &Tensor) -> Result<Tensor> {
        let gate_up = dense(gate_up)?;
        let size = self.halved(&gate_up)?;
        let up = (&gate_up, self.width as usize);
        self.forward(&size, &gate_up, up, 2 * self.width)
    }

    /// Computes rows of two tensors of one shape.
    ///
    /// # Errors
    /// As [`Gate::joint`].
    pub fn pair(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let (gate, up) = (dense(gate)?, dense(up)?);
        self.check_pair(&gate, &[("up", &up)])?;
        self.forward(&gate.size(), &gate, (&up, 0), self.width)
    }

    /// Returns the size of the results for `gate_up (…, 2·width)`.
    fn halved(&self, gate_up: &Tensor) -> Result<Vec<i64>> {
        let mut size = gate_up.size();
        match size.last_mut() {
            Some(last) if *last == 2 * self.width => *last = self.width,
            _ => {
                let expected = format!("[…, {}]", 2 * self.width);
                return Err(Common::shape("gate_up", size, expected).into());
            }
        }
        Ok(size)
    }

    /// Checks tensors of the shape of `gate (…, width)`.
    fn check_pair(&self, gate: &Tensor, others: &[(&'static str, &Tensor)]) -> Result<()> {
        let size = gate.size();
        if size.last() != Some(&self.width) {
            let expected = format!("[…, {}]", self.width);
            return Err(Common::shape("gate", size, expected).into());
        }
        others
            .iter()
            .try_for_each(|(name, tensor)| check_shapes(&[(name, tensor, &size)]))
    }

    fn forward(
        &self,
        size: &[i64],
        gate: &Tensor,
        up: (&Tensor, usize),
        stride: i64,
    ) -> Result<Tensor> {
        let y = Tensor::f_empty(size, (gate.kind(), gate.device()))?;
        let arguments = [
            ("gate", Elements(gate)),
            ("up", Element(up.0, up.1)),
            ("y", Elements(&y)),
            ("width", I32(self.width)),
            ("stride", I32(stride)),
        ];
        self.launch(&self.forward, &y, &arguments)?;
        Ok(y)
    }

    /// Returns the gradient of [`Gate::joint`].
    ///
    /// # Errors
    /// As [`Gate::joint`].
    pub fn joint_backward(&self, gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let (gate_up, dy) = (dense(gate_up)?, dense(dy)?);
        check_shapes(&[("dy", &dy, &self.halved(&gate_up)?)])?;
        let d_gate_up = Tensor::f_empty(gate_up.size(), (gate_up.kind(), gate_up.device()))?;
        let up = self.width as usize;
        let inputs = [(&gate_up, 0), (&gate_up, up)];
        let outputs = [(&d_gate_up, 0), (&d_gate_up, up)];
        self.backward(inputs, &dy, outputs, 2 * self.width)?;
        Ok(d_gate_up)
    }

    /// Returns the gradients of [`Gate::pair`].
    ///
    /// # Errors
    /// As [`Gate::joint`].
    pub fn pair_backward(
        &self,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let (gate, up, dy) = (dense(gate)?, dense(up)?, dense(dy)?);
        self.check_pair(&gate, &[("up", &up), ("dy", &dy)])?;
        let new = || Tensor::f_empty(gate.size(), (gate.kind(), gate.device()));
        let (d_gate, d_up) = (new()?, new()?);
        let inputs = [(&gate, 0), (&up, 0)];
        self.backward(inputs, &dy, [(&d_gate, 0), (&d_up, 0)], self.width)?;
        Ok((d_gate, d_up))
    }

    fn backward(
        &self,
        [gate, up]: [(&Tensor, usize); 2],
        dy: &Tensor,
        [d_gate, d_up]: [(&Tensor, usize); 2],
        stride: i64,
    ) -> Result<()> {
        let arguments = [
            ("gate", Element(gate.0, gate.1)),
            ("up", Element(up.0, up.1)),
            ("dy", Elements(dy)),
            ("d_gate", Element(d_gate.0, d_gate.1)),
            ("d_up", Element(d_up.0, d_up.1)),
            ("width", I32(self.width)),
            ("stride", I32(stride)),
        ];
        self.launch(&self.backward, dy, &arguments)
    }

    /// Launches a program for each block of a row of `y`.
    fn launch(
        &self,
        loaded: &Loaded,
        y: &Tensor,
        arguments: &[(&'static str, crate::kernels::Argument<'_>)],
    ) -> Result<()> {
        let width = self.width.max(1) as usize;
        let columns = width.div_ceil(loaded.variant.size("BLOCK")?);
        self.kernels
            .launch(loaded, [y.numel() / width, columns], arguments)
    }
}
