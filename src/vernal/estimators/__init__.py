"""Estimates of traces, diagonals and log-determinants of operators known only by their products."""

from .._ground import publish
from ._diagonal import diagonal as diagonal
from ._estimate import Estimate as Estimate
from ._functions import trace_of_function as trace_of_function
from ._gradient_pairs import GradientPairs as GradientPairs
from ._gradient_pairs import StoredPairs as StoredPairs
from ._hutch_pp import HutchPlusPlus as HutchPlusPlus
from ._hutchinson import Hutchinson as Hutchinson
from ._hutchinson_diagonal import HutchinsonDiagonal as HutchinsonDiagonal
from ._logdet import logdet as logdet
from ._method import Budget as Budget
from ._method import DiagonalMethod as DiagonalMethod
from ._method import Outcome as Outcome
from ._method import TraceMethod as TraceMethod
from ._norms import frobenius_norm as frobenius_norm
from ._norms import schatten_norm as schatten_norm
from ._probes import Normal as Normal
from ._probes import Probes as Probes
from ._probes import Rademacher as Rademacher
from ._probes import Sphere as Sphere
from ._probes import Steinhaus as Steinhaus
from ._quadrature import LanczosQuadrature as LanczosQuadrature
from ._spectral_density import SpectralDensity as SpectralDensity
from ._spectral_density import spectral_density as spectral_density
from ._trace import trace as trace
from ._xdiag import XDiag as XDiag
from ._xnysdiag import XNysDiag as XNysDiag
from ._xnystrace import XNysTrace as XNysTrace
from ._xtrace import XTrace as XTrace

publish(__name__, globals())
